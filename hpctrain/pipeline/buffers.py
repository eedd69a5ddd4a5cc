"""Memory for what is received, used again when nobody holds an array in it any more.

A stage may keep what it received, or pass it on as it is, for as long as it likes: memory comes back when the last
array over it is gone, not at a moment that somebody has to name. Local; knows no messages.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any

from hpctrain.contracts import Array, Arrays
from hpctrain.dtypes import dtype_of

__all__ = ["Buffers"]


class _Block:
    """One piece of memory and, while it is lent, a sign of life of the arrays over it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._sign: weakref.ref[Any] | None = None
        self.used = False

    @property
    def free(self) -> bool:
        return self._sign is None or self._sign() is None

    def lend(self) -> memoryview:
        """The memory through an object that lives exactly as long as views of it."""
        sign = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        self._sign = weakref.ref(sign)
        self.used = True
        return memoryview(sign).cast("B")


class Buffers:
    """Lends arrays. `num_made` counts the pieces of memory that were made so far."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._blocks: dict[int, list[_Block]] = {}
        self.num_made = 0

    def take(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """An array, values undefined; its memory is free again when no array over it is left."""
        arrays, size = self._arrays, prod(shape) * dtype_of(dtype).num_bytes
        if size == 0:
            return arrays.shaped(arrays.empty(0, dtype), shape)
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.free), None)
        if block is None:
            block = _Block(arrays.memory(arrays.empty(size, "uint8")))
            blocks.append(block)
            self.num_made += 1
        return arrays.shaped(arrays.from_memory(block.lend(), dtype), shape)

    def tidy(self) -> None:
        """Lets go of what has not been lent since the last call."""
        for size in list(self._blocks):
            kept = [block for block in self._blocks[size] if block.used or not block.free]
            for block in kept:
                block.used = False
            if kept:
                self._blocks[size] = kept
            else:
                del self._blocks[size]
