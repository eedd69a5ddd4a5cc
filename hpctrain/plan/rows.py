"""Where the blocks of an even all-to-all lie, without a list of them.

Owns the offsets of a matrix of num_ranks x num_ranks blocks whose rows are all cut alike: a million ranks squared would
not fit into memory as a list. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from hpctrain.plan import split

__all__ = ["EvenRows", "block", "uneven"]


@dataclass(frozen=True)
class EvenRows(Sequence[int]):
    """The offsets of a matrix of num_ranks**2 blocks: each row has `row_length` elements, split over the ranks."""

    row_length: int
    num_ranks: int

    def __len__(self) -> int:
        return self.num_ranks**2 + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row, block = divmod(index % len(self), self.num_ranks)
        return row * self.row_length + (split.part(self.row_length, self.num_ranks, block)[0] if block else 0)


def uneven(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The offsets of a matrix in which block (s, d) has counts[s][d] elements."""
    offsets = [0]
    for row in counts:
        for length in row:
            offsets.append(offsets[-1] + length)
    return tuple(offsets)


def block(bounds: Sequence[int], num_ranks: int, source: int, destination: int) -> tuple[int, int]:
    """The interval of the block that goes from rank `source` to rank `destination`."""
    index = source * num_ranks + destination
    return bounds[index], bounds[index + 1]
