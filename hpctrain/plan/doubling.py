"""Recursive doubling: in round k, a rank and the one whose number differs in bit k alone give each other all they have.

Owns the all-reduce and the all-gather of that kind, for any number of ranks by `fold`. With p a power of two:

    all_reduce     lg p rounds, every rank sends n lg p: best for short vectors
    all_gather     lg p rounds, every rank sends n minus its part

Otherwise two rounds come on top, in which a rank that sits out gives its data and gets the result. The two partners of
a round add the same two values, so all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.fold import Fold
from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, receive_all, send, send_all

__all__ = ["all_gather", "all_reduce", "gather_rounds"]


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """Partners exchange whole vectors, p = 4:     round 0   0 <> 1  2 <> 3        round 1   0 <> 2  1 <> 3."""
    p, n = len(bounds) - 1, bounds[-1]
    fold = Fold(p)

    def make(rank: int) -> Iterator[Step]:
        core, partner = fold.core(rank), fold.partner(rank)
        if n == 0:
            return
        if core is None:
            assert partner is not None
            yield send(partner, 0, n)
            yield receive(partner, 0, n)
            return
        if partner is not None:
            yield receive(partner, 0, n, combine=True)
        for peer in _peers(fold, core):
            yield (*send(peer, 0, n), *receive(peer, 0, n, combine=True))
        yield (Finish(0, n),)
        if partner is not None:
            yield send(partner, 0, n)

    return CollectivePlan("all_reduce", "recursive doubling", p, bounds, make)


def all_gather(bounds: Sequence[int]) -> CollectivePlan:
    """Partners exchange the blocks they have; these double each round."""
    p, n = len(bounds) - 1, bounds[-1]
    fold = Fold(p)
    blocks = fold.blocks(bounds)

    def make(rank: int) -> Iterator[Step]:
        core, partner = fold.core(rank), fold.partner(rank)
        if core is None:
            assert partner is not None
            yield send(partner, bounds[rank], bounds[rank + 1])
            yield receive_all(partner, [(0, bounds[rank]), (bounds[rank + 1], n)])
            return
        if partner is not None:
            yield receive(partner, bounds[partner], bounds[partner + 1])
        yield from gather_rounds(fold, blocks, core)
        if partner is not None:
            yield send_all(partner, [(0, bounds[partner]), (bounds[partner + 1], n)])

    return CollectivePlan("all_gather", "recursive doubling", p, bounds, make)


def gather_rounds(fold: Fold, blocks: Sequence[int], core: int) -> Iterator[Step]:
    """The doubling rounds of the core rank `core`, which has block `core` of `blocks`."""
    distance = 1
    while distance < fold.core_size:
        mine, theirs = core // distance * distance, (core // distance ^ 1) * distance
        peer = fold.rank(core ^ distance)
        yield (
            *send(peer, blocks[mine], blocks[mine + distance]),
            *receive(peer, blocks[theirs], blocks[theirs + distance]),
        )
        distance *= 2


def _peers(fold: Fold, core: int) -> Iterator[int]:
    distance = 1
    while distance < fold.core_size:
        yield fold.rank(core ^ distance)
        distance *= 2
