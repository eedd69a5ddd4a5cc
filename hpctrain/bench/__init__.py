"""Benchmarks of the user's own machine: contenders, fair timing, figures, a picture, and the table that follows.

Owns what `hpctrain bench` measures and how it is shown. `figures` and `tune` are pure; `contenders` and `measure` need
the ranks of a job; `picture` needs matplotlib. Must not know the command line.
"""
