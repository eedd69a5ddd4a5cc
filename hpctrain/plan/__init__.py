"""Plans: what happens, as plain data, for every rank at once.

Owns the pure part of the package: meshes, splits, placements, collective algorithms, schedules, and the functions that
check and price them. Standard library only; knows no process, no MPI and no array library, so every plan can be made,
proved and priced on a laptop for any number of ranks.
"""
