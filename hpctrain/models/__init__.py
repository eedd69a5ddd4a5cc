"""Models that come with hpctrain: small, complete, and written as a user would write their own.

Owns their shapes, initial values and losses. Must not know ranks, engines or files.

    gpt        a transformer in torch             gpt_shape  its parameters by formula, without torch
    mlp        a multi-layer network in NumPy     mlp_shape  the same for it
    initial    random numbers as a function of (seed, name, element)
"""
