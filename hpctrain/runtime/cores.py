"""Whether the ranks of a node have cores of their own, and how to give them some.

Owns the verdict and its words. Pure: the ranks' core sets come in as plain data. What follows for threads is in
`threads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

__all__ = ["crowding", "fair_shares", "spans"]


def fair_shares(core_sets: Sequence[Sequence[int]]) -> list[Fraction]:
    """Cores for each rank of a node: those it may use, each divided by the ranks that may use it.

        sets {0,1,2,3} {0,1,2,3}    shares 2, 2          nobody is bound
        sets {0,1} {2,3}            shares 2, 2          bound to cores of their own
        sets {0} {0,1,2}            shares 1/2, 5/2
    """
    users: dict[int, int] = {}
    for core_set in core_sets:
        for core in set(core_set):
            users[core] = users.get(core, 0) + 1
    return [sum((Fraction(1, users[core]) for core in set(core_set)), Fraction(0)) for core_set in core_sets]


def crowding(host: str, ranks: Sequence[int], core_sets: Sequence[Sequence[int]]) -> str:
    """One sentence if some of the ranks of a node may run on the same core, with what to do; else nothing.

    Args:
        host: the node's name.
        ranks: the ranks on it, by their numbers in the world.
        core_sets: the cores that each of them may run on.
    """
    cores = {core for core_set in core_sets for core in core_set}
    shares = fair_shares(core_sets)
    sharing = [rank for rank, share, own in zip(ranks, shares, core_sets, strict=True) if share < len(set(own))]
    if not sharing:
        return ""
    if len(ranks) > len(cores):
        return (f"ranks {spans(sharing)} on {host} share cores {spans(cores)}, fewer than ranks, and wait for each "
                "other's turn; start fewer ranks a node")
    several = min(shares) >= 2
    how = ("mpirun --bind-to core --map-by slot:PE=CORES_A_RANK, srun --cpus-per-task=CORES_A_RANK --cpu-bind=cores"
           if several else "mpirun --bind-to core, srun --cpus-per-task=1 --cpu-bind=cores")
    if min(shares) < 1:
        return (f"ranks {spans(sharing)} on {host} share cores and wait for each other's turn, though {len(cores)} "
                f"cores ({spans(cores)}) are there for {len(ranks)} ranks; bind them apart: {how}")
    return (f"ranks {spans(sharing)} on {host} are not bound: they may run on each other's cores ({spans(cores)}); "
            f"bind them: {how}")


def spans(numbers: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5; `none` for nothing."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
