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

__all__ = ["all_gather", "all_reduce", "broadcast", "gather_rounds", "reduce_rounds", "reduce_scatter"]


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
    return CollectivePlan("reduce_scatter", "ring", p, b, lambda rank: reduce_rounds(b, range(p), rank, finish=True))


def all_gather(bounds: Sequence[int]) -> CollectivePlan:
    """Every rank ends with all parts. In round k, rank r sends part r - k and stores part r - k - 1 (mod p)."""
    b = tuple(bounds)
    p = len(b) - 1
    return CollectivePlan("all_gather", "ring", p, b, lambda rank: gather_rounds(b, range(p), rank))


def all_reduce(bounds: Sequence[int]) -> CollectivePlan:
    """The reduce-scatter, then the all-gather: every rank ends with the same bits of the whole sum."""
    b = tuple(bounds)
    p = len(b) - 1

    def make(rank: int) -> Iterator[Step]:
        yield from reduce_rounds(b, range(p), rank, finish=True)
        yield from gather_rounds(b, range(p), rank)

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
    return CollectivePlan("broadcast", "ring", p, b, lambda rank: _chain(b, p, (rank - root) % p, rank), root)


def reduce_rounds(b: Sequence[int], members: Sequence[int], place: int, *, finish: bool) -> Iterator[Step]:
    """The rounds of `reduce_scatter` for the rank members[place], in a ring of `members`."""
    p = len(members)
    above, below = members[(place + 1) % p], members[(place - 1) % p]
    for k in range(p - 1):
        out, into = (place - k - 1) % p, (place - k - 2) % p
        yield (*send(above, b[out], b[out + 1]), *receive(below, b[into], b[into + 1], combine=True))
    if finish and b[place + 1] > b[place]:
        yield (Finish(b[place], b[place + 1]),)


def gather_rounds(b: Sequence[int], members: Sequence[int], place: int) -> Iterator[Step]:
    """The rounds of `all_gather` for the rank members[place], in a ring of `members`."""
    p = len(members)
    above, below = members[(place + 1) % p], members[(place - 1) % p]
    for k in range(p - 1):
        out, into = (place - k) % p, (place - k - 1) % p
        yield (*send(above, b[out], b[out + 1]), *receive(below, b[into], b[into + 1]))


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
