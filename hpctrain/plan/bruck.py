"""Bruck's algorithms: ceil(lg p) rounds for any number of ranks, for all-gathers and all-to-alls of little data.

Owns both plans (Bruck et al. 1997). The all-gather sends no more than any other, (p - 1) / p n. The all-to-all moves
each block several times, about n / 2 in each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.plan.rows import block
from hpctrain.plan.steps import CollectivePlan, Step, parts, receive_all, send_all

__all__ = ["all_gather", "all_to_all"]


def all_gather(bounds: Sequence[int]) -> CollectivePlan:
    """In the round with distance d, rank r passes parts r .. r + d - 1, all it has, to rank r - d.

    p = 4, parts held by rank 0:     0 | 0 1 | 0 1 2 3
    """
    p = len(bounds) - 1

    def make(rank: int) -> Iterator[Step]:
        distance = 1
        while distance < p:
            num = min(distance, p - distance)
            yield (
                *send_all((rank - distance) % p, parts(bounds, rank, num)),
                *receive_all((rank + distance) % p, parts(bounds, rank + distance, num)),
            )
            distance *= 2

    return CollectivePlan("all_gather", "bruck", p, bounds, make)


def all_to_all(bounds: Sequence[int], num_ranks: int) -> CollectivePlan:
    """A block that has j ranks to go takes a step of length 2^k in round k for each bit k of j.

    Before round k, the block that started at rank s is at s + (j mod 2^k); those at rank r with bit k set go to
    r + 2^k, all in one message.
    """
    p = num_ranks

    def moving(rank: int, distance: int) -> list[tuple[int, int]]:
        """The blocks that are at `rank` and leave it in the round of `distance`."""
        far = [j for j in range(p) if j & distance]
        return [block(bounds, p, (rank - j % distance) % p, (rank - j % distance + j) % p) for j in far]

    def make(rank: int) -> Iterator[Step]:
        distance = 1
        while distance < p:
            above, below = (rank + distance) % p, (rank - distance) % p
            yield (*send_all(above, moving(rank, distance)), *receive_all(below, moving(below, distance)))
            distance *= 2

    return CollectivePlan("all_to_all", "bruck", p, bounds, make)
