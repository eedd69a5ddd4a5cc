"""Bidirectional ring: both directions of every link at once, so that half the rounds suffice.

Owns reduce-scatter, all-gather and all-reduce along a ring in which each rank sends to both neighbours. The volume of a
rank is that of the plain ring, in ceil((p - 1) / 2) rounds for each half. Two ranks have one link: the plain ring.

The upward direction covers the `up` = p // 2 ranks below a part's owner, the downward one the other `down` ranks above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def reduce_scatter(bounds: Sequence[int]) -> CollectivePlan:
    """Part r ends on rank r, which adds up, in the last round, what comes from below, its own, and what from above."""
    p = len(bounds) - 1
    return CollectivePlan("reduce_scatter", "bidirectional ring", p, bounds, lambda rank: _reduce(bounds, p, rank))


def all_gather(bounds: Sequence[int]) -> CollectivePlan:
    """Each part sets out in both directions and is passed on until the two meet."""
    p = len(bounds) - 1
    return CollectivePlan("all_gather", "bidirectional ring", p, bounds, lambda rank: _gather(bounds, p, rank))


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """The reduce-scatter, then the all-gather."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        yield from _reduce(bounds, p, rank)
        yield from _gather(bounds, p, rank)

    return CollectivePlan("all_reduce", "bidirectional ring", p, bounds, make)


def _reduce(b: Sequence[int], p: int, rank: int) -> Iterator[Step]:
    up, down = p // 2, (p - 1) // 2
    above, below = (rank + 1) % p, (rank - 1) % p

    def part(owner: int) -> tuple[int, int]:
        return b[owner % p], b[owner % p + 1]

    for k in range(up):
        step = (
            *send(above, *part(rank + up - k)),
            *receive(below, *part(rank + up - k - 1), combine=True),
        )
        late = k - (up - down)  # both directions end together, at the owner
        if late >= 0:
            step += send(below, *part(rank - down + late))
            step += receive(above, *part(rank - down + late + 1), combine=True)
        yield step
    if b[rank + 1] > b[rank]:
        yield (Finish(b[rank], b[rank + 1]),)


def _gather(b: Sequence[int], p: int, rank: int) -> Iterator[Step]:
    up, down = p // 2, (p - 1) // 2
    above, below = (rank + 1) % p, (rank - 1) % p

    def part(owner: int) -> tuple[int, int]:
        return b[owner % p], b[owner % p + 1]

    for k in range(up):
        step = (*send(above, *part(rank - k)), *receive(below, *part(rank - k - 1)))
        if k < down:
            step += (*send(below, *part(rank + k)), *receive(above, *part(rank + k + 1)))
        yield step
