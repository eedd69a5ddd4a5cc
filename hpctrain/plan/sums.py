"""How an element came about: sums of ranks' contributions, as numbers that are equal when the sums are.

Owns the bookkeeping of the checker. Addition of floating point numbers is commutative but not associative, so two
values are the same here when they were added up by the same tree, whichever way round the two sides of each addition
stood: then, and only then, their bits are equal for every input. Pure, standard library only.
"""

from __future__ import annotations

__all__ = ["Sums"]


class Sums:
    """Values: 0 is nothing; rank r's own contribution is r + 1; sums and finished sums follow."""

    def __init__(self, num_ranks: int) -> None:
        self._complete = (1 << num_ranks) - 1
        self._masks = [0, *(1 << rank for rank in range(num_ranks))]  # value -> its contributions, one bit a rank
        self._finished = [False] * len(self._masks)
        self._known: dict[tuple[int, int], int] = {}

    def of(self, rank: int) -> int:
        """The contribution of `rank`."""
        return rank + 1

    def add(self, a: int, b: int) -> int:
        """The sum of two values."""
        return self._make((min(a, b), max(a, b)), self._masks[a] | self._masks[b], finished=False)

    def finish(self, value: int) -> int:
        """`value`, finished."""
        return self._make((value, value), self._masks[value], finished=True)

    def overlap(self, a: int, b: int) -> bool:
        """Whether some contribution is in both."""
        return bool(self._masks[a] & self._masks[b])

    def is_complete(self, value: int) -> bool:
        """Whether every rank's contribution is in it."""
        return self._masks[value] == self._complete

    def is_finished(self, value: int) -> bool:
        """Whether it has been finished."""
        return self._finished[value]

    def ranks(self, value: int) -> list[int]:
        """The ranks whose contributions are in it."""
        mask, found = self._masks[value], []
        while mask:
            lowest = mask & -mask
            found.append(lowest.bit_length() - 1)
            mask ^= lowest
        return found

    def describe(self, value: int) -> str:
        """In words."""
        return f"holds the contributions of ranks {self.ranks(value)}" + (", finished" if self._finished[value] else "")

    def _make(self, key: tuple[int, int], mask: int, *, finished: bool) -> int:
        if key not in self._known:
            self._known[key] = len(self._masks)
            self._masks.append(mask)
            self._finished.append(finished)
        return self._known[key]
