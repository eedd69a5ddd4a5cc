"""Binomial trees: the number of ranks that have (or have given) the data doubles in each round.

Owns broadcast, reduce, scatter and gather along a binomial tree, and the all-reduce of reduce and broadcast. Places in
the tree are counted from the root. All take ceil(lg p) rounds at the root. A broadcast, p = 8:

    round 0   0 > 4          round 1   0 > 2  4 > 6          round 2   0 > 1  2 > 3  4 > 5  6 > 7

Reduce and gather are the same picture backwards. Broadcast and reduce pass on n each time; in scatter and gather a rank
passes on its children's parts only, so that the root sends or receives (p - 1) / p n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.steps import CollectivePlan, Finish, Step, parts, receive, receive_all, send, send_all

__all__ = ["all_reduce", "broadcast", "children", "gather", "parent", "reduce", "scatter"]


def parent(place: int) -> int:
    """The place above `place` > 0."""
    return place & (place - 1)


def children(place: int, num_ranks: int) -> list[int]:
    """The places below `place`, the one with the largest subtree first; child c heads c .. 2c - place - 1."""
    reach = place & -place if place else 1 << (num_ranks - 1).bit_length()
    below = []
    while reach > 1:
        reach //= 2
        if place + reach < num_ranks:
            below.append(place + reach)
    return below


def broadcast(bounds: Sequence[int], num_ranks: int, root: int = 0) -> CollectivePlan:
    """Everything from the root down the tree."""
    n = bounds[-1]
    return CollectivePlan("broadcast", "binomial tree", num_ranks, bounds,
                          lambda rank: _down(n, num_ranks, root, rank), root)


def reduce(bounds: Sequence[int], root: int = 0) -> CollectivePlan:
    """Partial sums up the tree; the root finishes."""
    p, n = len(bounds) - 1, bounds[-1]
    return CollectivePlan("reduce", "binomial tree", p, bounds, lambda rank: _up(n, p, root, rank), root)


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """Up to rank 0 and down again."""
    p, n = len(bounds) - 1, bounds[-1]

    def make(rank: int) -> Iterator[Step]:
        yield from _up(n, p, 0, rank)
        yield from _down(n, p, 0, rank)

    return CollectivePlan("all_reduce", "binomial tree", p, bounds, make)


def scatter(bounds: Sequence[int], root: int = 0) -> CollectivePlan:
    """Each rank gets the parts of its subtree and passes on those of its children."""
    p = len(bounds) - 1
    return CollectivePlan("scatter", "binomial tree", p, bounds, lambda rank: _scatter(bounds, p, root, rank), root)


def gather(bounds: Sequence[int], root: int = 0) -> CollectivePlan:
    """Each rank collects the parts of its subtree and passes them up."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        place = (rank - root) % p
        for child in reversed(children(place, p)):
            yield receive_all((child + root) % p, subtree(bounds, p, root, child))
        if place:
            yield send_all((parent(place) + root) % p, subtree(bounds, p, root, place))

    return CollectivePlan("gather", "binomial tree", p, bounds, make, root)


def subtree(bounds: Sequence[int], p: int, root: int, place: int) -> tuple[tuple[int, int], ...]:
    """The intervals of the parts of all ranks at and below `place` > 0."""
    return parts(bounds, place + root, min(place & -place, p - place))


def _scatter(bounds: Sequence[int], p: int, root: int, rank: int) -> Iterator[Step]:
    place = (rank - root) % p
    if place:
        yield receive_all((parent(place) + root) % p, subtree(bounds, p, root, place))
    for child in children(place, p):
        yield send_all((child + root) % p, subtree(bounds, p, root, child))


def _down(n: int, p: int, root: int, rank: int) -> Iterator[Step]:
    place = (rank - root) % p
    if place:
        yield receive((parent(place) + root) % p, 0, n)
    for child in children(place, p):
        yield send((child + root) % p, 0, n)


def _up(n: int, p: int, root: int, rank: int) -> Iterator[Step]:
    place = (rank - root) % p
    for child in reversed(children(place, p)):
        yield receive((child + root) % p, 0, n, combine=True)
    if place:
        yield send((parent(place) + root) % p, 0, n)
    elif n:
        yield (Finish(0, n),)
