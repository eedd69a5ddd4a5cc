"""Ring algorithms: reduce-scatter, all-gather, all-reduce, and a broadcast along the ring.

Owns four plans in which each rank only ever talks to its two neighbours: it receives from rank - 1 and sends to
rank + 1. Knows nothing of the engine. Counts are those of the usual cost table (Thakur, Rabenseifner, Gropp 2005):

    reduce-scatter, all-gather   p - 1 rounds, every rank sends n minus one part
    all-reduce                   2 (p - 1) rounds, twice that
    broadcast                    m + p - 2 rounds for m pieces, every rank but the last sends n
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]


def reduce_scatter(bounds: Sequence[int]) -> CollectivePlan:
    """Part r of the sum ends on rank r; the other parts of the workspace hold partial sums afterwards.

    In round k, rank r sends part r - k - 1 and adds part r - k - 2 (mod p). The parts on their way, p = 4:

        round   0 -> 1   1 -> 2   2 -> 3   3 -> 0
          0        3        0        1        2
          1        2        3        0        1
          2        1        2        3        0       <- each rank receives its own part last
    """
    b = tuple(bounds)
    p = len(b) - 1
    return CollectivePlan("reduce_scatter", "ring", p, b, lambda rank: _reduce_rounds(b, p, rank))


def all_gather(bounds: Sequence[int]) -> CollectivePlan:
    """Every rank ends with all parts. In round k, rank r sends part r - k and stores part r - k - 1 (mod p)."""
    b = tuple(bounds)
    p = len(b) - 1
    return CollectivePlan("all_gather", "ring", p, b, lambda rank: gather_rounds(b, p, rank))


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """The reduce-scatter, then the all-gather: every rank ends with the same bits of the whole sum."""
    b = tuple(bounds)
    p = len(b) - 1

    def make(rank: int) -> Iterator[Step]:
        yield from _reduce_rounds(b, p, rank)
        yield from gather_rounds(b, p, rank)

    return CollectivePlan("all_reduce", "ring", p, b, make)


def broadcast(bounds: Sequence[int], num_ranks: int, root: int = 0) -> CollectivePlan:
    """A pipelined chain from `root` around the ring; `bounds` cuts the workspace into pieces, as many as one likes.

    While a rank passes piece i - 1 on, it already receives piece i:

        root      0 1 2 3
        root + 1    0 1 2 3        columns are rounds, entries are the piece being sent
        root + 2      0 1 2 3

    With many pieces the time tends to that of sending n once, half of a scatter followed by a ring all-gather; with
    num_ranks pieces the two are equal.
    """
    b = tuple(bounds)
    p = num_ranks
    return CollectivePlan("broadcast", "ring chain", p, b, lambda rank: _chain(b, p, (rank - root) % p, rank), root)


def _reduce_rounds(b: tuple[int, ...], p: int, rank: int) -> Iterator[Step]:
    for k in range(p - 1):
        out, into = (rank - k - 1) % p, (rank - k - 2) % p
        yield (
            *send((rank + 1) % p, b[out], b[out + 1]),
            *receive((rank - 1) % p, b[into], b[into + 1], combine=True),
        )
    if b[rank + 1] > b[rank]:
        yield (Finish(b[rank], b[rank + 1]),)


def gather_rounds(b: tuple[int, ...], p: int, rank: int) -> Iterator[Step]:
    """The rounds of `all_gather` for one rank."""
    for k in range(p - 1):
        out, into = (rank - k) % p, (rank - k - 1) % p
        yield (*send((rank + 1) % p, b[out], b[out + 1]), *receive((rank - 1) % p, b[into], b[into + 1]))


def _chain(b: tuple[int, ...], p: int, position: int, rank: int) -> Iterator[Step]:
    num_pieces = len(b) - 1
    receives, sends = position > 0, position < p - 1
    if p == 1:
        return
    # The root has its pieces already and so starts to send one step earlier than it would have received them.
    lag = 1 if receives else 0
    for i in range(num_pieces + (lag if sends else 0)):
        step: Step = ()
        if sends and i >= lag:
            step += send((rank + 1) % p, b[i - lag], b[i - lag + 1])
        if receives and i < num_pieces:
            step += receive((rank - 1) % p, b[i], b[i + 1])
        yield step
