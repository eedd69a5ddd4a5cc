"""Broadcast of long vectors as a scatter and an all-gather (van de Geijn).

Owns that one plan: the root scatters p parts along a binomial tree, then all pass parts on around a ring. lg p + p - 1
rounds, and about 2 (p - 1) / p n sent by the root, whatever p.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan import split
from hpctrain.plan.ring import gather_rounds
from hpctrain.plan.steps import CollectivePlan, Step, receive, send
from hpctrain.plan.tree import children, parent

__all__ = ["broadcast"]


def broadcast(count: int, num_ranks: int, root: int = 0) -> CollectivePlan:
    """Part i belongs to the i-th rank counted from the root, so that every subtree's parts are one interval."""
    p, b = num_ranks, split.bounds(count, num_ranks)
    members = [(root + place) % p for place in range(p)]

    def subtree(place: int) -> tuple[int, int]:
        return b[place], b[min(place + (place & -place), p)]

    def make(rank: int) -> Iterator[Step]:
        place = (rank - root) % p
        if place:
            yield receive(members[parent(place)], *subtree(place))
        for child in children(place, p):
            yield send(members[child], *subtree(child))
        yield from gather_rounds(b, members, place)

    return CollectivePlan("broadcast", "scatter + all-gather", p, b, make, root)
