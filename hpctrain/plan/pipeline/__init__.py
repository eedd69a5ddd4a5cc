"""Pipelines as data: who runs which micro-batch through which stage when, for all ranks at once.

Owns the schedules, their text, messages, proof, simulation, pictures and traces, the versions of the weights that a
schedule without flush uses, and the partition of layers into stages. Standard library only; knows no model and no MPI.
`plan` is the file to read first, `catalogue` the register.
"""
