"""Where the optimizer's own arrays live: memory, or a place that must be told what is needed when.

Owns the protocol and the plain home. Knows nothing of optimizers: an array is (name, buffer), a chunk is spans of the
arrays of buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.contracts import Array, Arrays

__all__ = ["Chunk", "Home", "Memory", "Span"]


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of each of this rank's arrays of flat buffer `buffer` (its states, its master)."""

    buffer: int
    start: int
    stop: int


Chunk = tuple[Span, ...]  # what is updated at once


class Home(Protocol):
    """Lends arrays and hears when they are used. All calls are local, by one thread.

        expect(chunks)                               once, when all arrays are made
        before(0) .. after(0)  before(1) .. after(1) ...     in each update
    """

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        """A flat array of zeros for `name` (a state's, or "master") of flat buffer `buffer`; it stays valid."""

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """The chunks that each update goes through, in this order; each element is in one of them at most."""

    def before(self, index: int) -> None:
        """Chunk `index` is about to be read and written: have it there, and the next one on its way."""

    def after(self, index: int) -> None:
        """Chunk `index` is not touched again in this update: write it behind."""


class Memory:
    """Plain memory of the array library: nothing to do before or after."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        """New zeroed memory."""
        return self._arrays.zeros(count, dtype)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to prepare."""

    def before(self, index: int) -> None:
        """Memory is always there."""

    def after(self, index: int) -> None:
        """Memory stays."""
