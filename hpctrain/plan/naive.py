"""Everyone to everyone: every collective in one round, the plain definition of each.

Owns the plans against which the others are tested. Each is the fewest rounds there can be, one, at the price of volume
or of a rank that does all the work:

    broadcast, scatter            the root sends to all         gather, reduce    the root receives from all
    all_reduce                    all send all to all: (p - 1) n each
    reduce_scatter, all_gather, all_to_all                      each part goes straight to where it belongs

All are direct: a sum is formed where it is needed, from untouched contributions, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.rows import block
from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

_Bounds = Sequence[int]


def broadcast(bounds: _Bounds, num_ranks: int, root: int = 0) -> CollectivePlan:
    """The root sends everything to everyone."""
    n, others = bounds[-1], _others(num_ranks, root)

    def make(rank: int) -> Iterator[Step]:
        if rank == root:
            yield tuple(a for peer in others for a in send(peer, 0, n))
        else:
            yield receive(root, 0, n)

    return CollectivePlan("broadcast", "naive", num_ranks, bounds, make, root)


def scatter(bounds: _Bounds, root: int = 0) -> CollectivePlan:
    """The root sends each rank its part."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        if rank == root:
            yield tuple(a for peer in _others(p, root) for a in send(peer, bounds[peer], bounds[peer + 1]))
        else:
            yield receive(root, bounds[rank], bounds[rank + 1])

    return CollectivePlan("scatter", "naive", p, bounds, make, root)


def gather(bounds: _Bounds, root: int = 0) -> CollectivePlan:
    """Each rank sends the root its part."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        if rank == root:
            yield tuple(a for peer in _others(p, root) for a in receive(peer, bounds[peer], bounds[peer + 1]))
        else:
            yield send(root, bounds[rank], bounds[rank + 1])

    return CollectivePlan("gather", "naive", p, bounds, make, root)


def reduce(bounds: _Bounds, root: int = 0) -> CollectivePlan:
    """Each rank sends the root everything; the root adds."""
    p, n = len(bounds) - 1, bounds[-1]

    def make(rank: int) -> Iterator[Step]:
        if rank == root:
            yield tuple(a for peer in _others(p, root) for a in receive(peer, 0, n, combine=True))
            yield _finish(0, n)
        else:
            yield send(root, 0, n)

    return CollectivePlan("reduce", "naive", p, bounds, make, root, direct=True)


def all_reduce(bounds: _Bounds) -> CollectivePlan:
    """Each rank sends everything to everyone, and each adds up what it gets."""
    p, n = len(bounds) - 1, bounds[-1]

    def make(rank: int) -> Iterator[Step]:
        yield tuple(a for q in _others(p, rank) for a in (*send(q, 0, n), *receive(q, 0, n, combine=True)))
        yield _finish(0, n)

    return CollectivePlan("all_reduce", "naive", p, bounds, make, direct=True)


def reduce_scatter(bounds: _Bounds) -> CollectivePlan:
    """Each rank sends every part to its owner, and the owner adds."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        mine = bounds[rank], bounds[rank + 1]
        yield tuple(a for q in _others(p, rank)
                    for a in (*send(q, bounds[q], bounds[q + 1]), *receive(q, *mine, combine=True)))
        yield _finish(*mine)

    return CollectivePlan("reduce_scatter", "naive", p, bounds, make, direct=True)


def all_gather(bounds: _Bounds) -> CollectivePlan:
    """Each rank sends its part to everyone."""
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        mine = bounds[rank], bounds[rank + 1]
        yield tuple(a for q in _others(p, rank) for a in (*send(q, *mine), *receive(q, bounds[q], bounds[q + 1])))

    return CollectivePlan("all_gather", "naive", p, bounds, make)


def all_to_all(bounds: _Bounds, num_ranks: int) -> CollectivePlan:
    """Each rank sends each block to its destination."""

    def make(rank: int) -> Iterator[Step]:
        yield tuple(a for q in _others(num_ranks, rank)
                    for a in (*send(q, *block(bounds, num_ranks, rank, q)),
                              *receive(q, *block(bounds, num_ranks, q, rank))))

    return CollectivePlan("all_to_all", "naive", num_ranks, bounds, make)


def _others(num_ranks: int, rank: int) -> list[int]:
    """The other ranks, nearest above first, so that not all begin with the same one."""
    return [(rank + k) % num_ranks for k in range(1, num_ranks)]


def _finish(start: int, stop: int) -> Step:
    return (Finish(start, stop),) if stop > start else ()
