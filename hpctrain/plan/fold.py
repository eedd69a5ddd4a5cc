"""Any number of ranks made a power of two: some ranks hand their data to a neighbour and sit out.

Owns the numbering. With p = 2^k + rem ranks, the first 2 rem ranks pair up; the odd one of a pair sends its data to
the even one and gets the result at the end (Thakur, Rabenseifner, Gropp 2005, section 4.5). The 2^k ranks that stay are
the *core*:

    p = 6, rem = 2     rank   0 <- 1   2 <- 3   4   5
                       core   0        1        2   3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fold"]


@dataclass(frozen=True)
class Fold:
    """The pairing of `num_ranks` ranks, counted from `root`, which is always in the core, as its first rank."""

    num_ranks: int
    root: int = 0

    @property
    def core_size(self) -> int:
        """The largest power of two that is not more than the number of ranks."""
        return 1 << (self.num_ranks.bit_length() - 1)

    @property
    def num_pairs(self) -> int:
        """Pairs, and ranks that sit out."""
        return self.num_ranks - self.core_size

    def core(self, rank: int) -> int | None:
        """The number of `rank` in the core, or None where it sits out."""
        place = (rank - self.root) % self.num_ranks
        if place >= 2 * self.num_pairs:
            return place - self.num_pairs
        return None if place % 2 else place // 2

    def rank(self, core: int) -> int:
        """The rank with number `core` in the core."""
        place = 2 * core if core < self.num_pairs else core + self.num_pairs
        return (place + self.root) % self.num_ranks

    def partner(self, rank: int) -> int | None:
        """The other rank of a pair, or None where `rank` is in none."""
        place = (rank - self.root) % self.num_ranks
        return (self.root + (place ^ 1)) % self.num_ranks if place < 2 * self.num_pairs else None

    def blocks(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Parts of ranks become blocks of the core: a pair's two parts are one block. Only for root 0."""
        assert self.root == 0
        return (*(bounds[self.rank(core)] for core in range(self.core_size)), bounds[-1])
