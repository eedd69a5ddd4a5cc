"""Recursive halving: in each round, partners give each other the half of the blocks that is not theirs, and add.

Owns what is built on it (Rabenseifner 2004): the reduce-scatter, the all-reduce that goes on with recursive doubling,
and the reduce that goes on with a gather to the root. With p a power of two and n bytes:

    reduce_scatter         lg p rounds     every rank sends (p - 1) / p n
    all_reduce, reduce   2 lg p rounds     twice that (at most, for the reduce)

Any other number of ranks by `fold`: two more rounds, one for the reduce, with at most n more sent in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan import split
from hpctrain.plan.doubling import gather_rounds
from hpctrain.plan.fold import Fold
from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def reduce_scatter(bounds: Sequence[int]) -> CollectivePlan:
    """Part r ends on rank r. A pair's two parts are one block until the end."""
    p = len(bounds) - 1
    fold = Fold(p)
    blocks = fold.blocks(bounds)

    def make(rank: int) -> Iterator[Step]:
        core, partner = fold.core(rank), fold.partner(rank)
        yield from _halving(fold, blocks, rank)
        if partner is not None:
            other = rank if core is None else partner
            message = (receive if core is None else send)(partner, bounds[other], bounds[other + 1])
            yield message

    return CollectivePlan("reduce_scatter", "rabenseifner", p, bounds, make)


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """Halving, then doubling. Blocks that rank 0 of 4 sends:     2 3 | 1 | 0 | 0 1."""
    p, n = len(bounds) - 1, bounds[-1]
    fold = Fold(p)
    blocks = split.bounds(n, fold.core_size)

    def make(rank: int) -> Iterator[Step]:
        core, partner = fold.core(rank), fold.partner(rank)
        yield from _halving(fold, blocks, rank)
        if core is not None:
            yield from gather_rounds(fold, blocks, core)
        if partner is not None:
            yield (receive if core is None else send)(partner, 0, n)

    return CollectivePlan("all_reduce", "rabenseifner", p, bounds, make)


def reduce(bounds: Sequence[int], root: int = 0) -> CollectivePlan:
    """Halving, then a binomial gather of the finished blocks to the root, which is rank 0 of the core."""
    p, n = len(bounds) - 1, bounds[-1]
    fold = Fold(p, root)
    blocks = split.bounds(n, fold.core_size)

    def make(rank: int) -> Iterator[Step]:
        yield from _halving(fold, blocks, rank)
        core = fold.core(rank)
        distance = 1
        while core is not None and distance < fold.core_size:
            if core & distance:
                yield send(fold.rank(core - distance), blocks[core], blocks[core + distance])
                return
            theirs = core + distance
            yield receive(fold.rank(theirs), blocks[theirs], blocks[theirs + distance])
            distance *= 2

    return CollectivePlan("reduce", "rabenseifner", p, bounds, make, root)


def _halving(fold: Fold, blocks: Sequence[int], rank: int) -> Iterator[Step]:
    """The core rank c ends with block c of the sum, finished."""
    core, partner, n = fold.core(rank), fold.partner(rank), blocks[-1]
    if core is None:
        assert partner is not None
        yield send(partner, 0, n)
        return
    if partner is not None:
        yield receive(partner, 0, n, combine=True)
    distance = fold.core_size // 2
    while distance:
        mine, theirs = core // distance * distance, (core // distance ^ 1) * distance
        peer = fold.rank(core ^ distance)
        yield (
            *send(peer, blocks[theirs], blocks[theirs + distance]),
            *receive(peer, blocks[mine], blocks[mine + distance], combine=True),
        )
        distance //= 2
    if blocks[core + 1] > blocks[core]:
        yield (Finish(blocks[core], blocks[core + 1]),)
