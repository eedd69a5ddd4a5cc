"""Pairwise exchange: every rank sends each part straight to where it belongs, to one rank after the other.

Owns the reduce-scatter for which no partial sum ever travels, the all-reduce that starts with it, and the all-to-all.
Same volume and rounds as the ring (p - 1 rounds, n minus one part sent by each rank). It is the algorithm for half
types: the owner adds in float32 and rounds once. It also never writes another rank's part, so the input can stay
untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan import rows
from hpctrain.plan.ring import gather_rounds
from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_reduce", "all_to_all", "reduce_scatter"]


def reduce_scatter(bounds: Sequence[int], block: int | None = None) -> CollectivePlan:
    """Part r of the sum ends on rank r; nothing else of the workspace is written.

    In round k = 1..p-1, rank r sends part r + k to its owner and adds its own part as it comes from r - k (mod p).
    `block` (elements) cuts all parts into blocks that go through all rounds one after the other, so that the owner's
    wide accumulator never needs more than one block.
    """
    b = tuple(bounds)
    p = len(b) - 1
    return CollectivePlan("reduce_scatter", "pairwise", p, b, lambda rank: _rounds(b, p, rank, block),
                          direct=True)


def all_reduce(bounds: Sequence[int], block: int | None = None) -> CollectivePlan:
    """The pairwise reduce-scatter, then a ring all-gather of the finished parts."""
    b = tuple(bounds)
    p = len(b) - 1

    def make(rank: int) -> Iterator[Step]:
        yield from _rounds(b, p, rank, block)
        yield from gather_rounds(b, range(p), rank)

    return CollectivePlan("all_reduce", "pairwise", p, b, make, direct=True)


def all_to_all(bounds: Sequence[int], num_ranks: int) -> CollectivePlan:
    """In round k = 1..p-1, rank r sends to r + k its block and receives from r - k (mod p)."""
    p = num_ranks

    def make(rank: int) -> Iterator[Step]:
        for k in range(1, p):
            to, source = (rank + k) % p, (rank - k) % p
            yield (*send(to, *rows.block(bounds, p, rank, to)), *receive(source, *rows.block(bounds, p, source, rank)))

    return CollectivePlan("all_to_all", "pairwise", p, bounds, make)


def _rounds(b: tuple[int, ...], p: int, rank: int, block: int | None) -> Iterator[Step]:
    longest = max(b[i + 1] - b[i] for i in range(p))
    size = block or max(longest, 1)

    def piece(owner: int, i: int) -> tuple[int, int]:
        return min(b[owner] + i * size, b[owner + 1]), min(b[owner] + (i + 1) * size, b[owner + 1])

    for i in range(-(-longest // size)):
        own = piece(rank, i)
        for k in range(1, p):
            to, source = (rank + k) % p, (rank - k) % p
            yield (*send(to, *piece(to, i)), *receive(source, *own, combine=True))
        if own[1] > own[0]:
            yield (Finish(*own),)
