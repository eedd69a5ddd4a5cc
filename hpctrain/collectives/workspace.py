"""The memory that a program works on: where each element of a plan's workspace lies on this rank.

Owns two ways for it to lie there, one after the other or block by block, and the scratch that groups keep. Knows plans'
intervals only; the executor moves and adds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.contracts import Array, Arrays

__all__ = ["Blocks", "Scratch", "Workspace"]


class Scratch:
    """Small flat arrays that are kept for reuse, each with its memory. One a group; not shared between threads."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, str, int], list[tuple[Array, memoryview]]] = defaultdict(list)

    def take(self, arrays: Arrays, count: int, dtype: str) -> tuple[Array, memoryview]:
        """An array of `count` elements, values undefined, for the taker alone until given back."""
        free = self._free[arrays.name, dtype, count]
        if free:
            return free.pop()
        array = arrays.empty(count, dtype)
        return array, arrays.memory(array)

    def give(self, arrays: Arrays, dtype: str, array: Array, memory: memoryview) -> None:
        """Gives back what `take` returned."""
        self._free[arrays.name, dtype, arrays.shape(array)[0]].append((array, memory))


@dataclass(slots=True)
class Workspace:
    """Flat arrays, and what combining means.

    Elements are sent from `source` and results are written to `target`, the same array for a collective in place.
    `target` starts at element `offset` of the workspace. Sums of half types (accumulate != dtype) are carried in
    `accumulate` between the first addition to an interval and its Finish, where they are rounded once. `factor` is
    multiplied in at Finish.
    """

    arrays: Arrays
    dtype: str
    num_bytes: int  # of one element
    source: Array
    target: Array
    offset: int = 0
    operation: str = "sum"
    accumulate: str = ""
    factor: float | None = None
    target_memory: memoryview | None = None  # the bytes of target, where the maker has them already
    source_memory: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.accumulate = self.accumulate or self.dtype
        if self.target_memory is None:
            self.target_memory = self.arrays.memory(self.target)
        self.source_memory = self.target_memory if self.target is self.source else self.arrays.memory(self.source)

    def outgoing(self, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes of [start, stop) to be sent."""
        return (self.source_memory[start * self.num_bytes : stop * self.num_bytes],)

    def incoming(self, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes that [start, stop) is received into."""
        assert self.target_memory is not None
        return (self.target_memory[(start - self.offset) * self.num_bytes : (stop - self.offset) * self.num_bytes],)

    def home(self, start: int, stop: int) -> Array:
        """The result's elements [start, stop)."""
        return self.target[start - self.offset : stop - self.offset]


class Blocks:
    """Bytes block by block: those blocks that are this rank's own, and room for others that pass through.

    `bounds` are the offsets of the blocks in elements; `own` maps the number of a block to its bytes on this rank.
    """

    def __init__(self, bounds: Sequence[int], num_bytes: int, own: Mapping[int, memoryview]) -> None:
        self.num_bytes = num_bytes
        self._bounds, self._places = bounds, dict(own)

    def outgoing(self, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes of [start, stop), a view for each block."""
        views = []
        block = bisect_right(self._bounds, start) - 1
        while start < stop:
            first, last = self._bounds[block], self._bounds[block + 1]
            end = min(stop, last)
            if end > start:
                if block not in self._places:
                    self._places[block] = memoryview(bytearray((last - first) * self.num_bytes))
                views.append(self._places[block][(start - first) * self.num_bytes : (end - first) * self.num_bytes])
            start, block = end, block + 1
        return views

    incoming = outgoing
