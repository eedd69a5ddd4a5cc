"""Data parallelism on flat buffers: which rank keeps what, who reduces and gathers when (ZeRO, arXiv 1910.02054).

    options      the switch: stage 0 to 3, and where parameters live
    regions      the flat buffers of a model: their types, their owners
    held         an array over the ranges of a flat buffer that a rank keeps
    windows      memory that buckets pass through
    gradients    from what a model delivers to the sums that the update reads
    parameters   where parameters live, and how all ranks see what their owners updated
    nodes        parameters that exist once per node, on several nodes
    units        parameters that are gathered for a unit of the model and given up after it

Knows the contracts, groups and plans; neither an optimizer nor any library.
"""
