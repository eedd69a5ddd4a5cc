"""Arrays that live in a file on a local disk of the node: read ahead of an update, written behind it.

    update      | chunk 0 | chunk 1 | chunk 2 | chunk 3 | ...
    reader      |0|1 |2   |3   |4   ...                          the next ones, as many as the window holds
    writer                |0     |1     |2     |...              and out of memory

The arrays are views of the mapped file, so nothing is copied and whoever reads or writes one at another time (a
checkpoint) needs to know nothing of this; only when pages come and go is decided here. A thread that reads and one that
writes run beside the arithmetic. Owns the window: how much of the file is in memory at a time. Must not know optimizers
or models.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import NamedTuple, Protocol

from hpctrain.contracts import Array, Arrays
from hpctrain.dtypes import dtype_of
from hpctrain.zero.mapped import PAGE, Extent, MappedFile

__all__ = ["Disk"]

_AHEAD = 2  # chunks that are read before their turn
_KINDS = {"gradient": "gradients", "pending": "gradients", "parameter": "parameters"}  # all others are states


class Span(Protocol):
    """Elements [start, stop) of each array of flat buffer `buffer`."""

    @property
    def buffer(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class _Lent(NamedTuple):
    name: str
    buffer: int
    item_bytes: int
    extent: Extent


class _Chunk(NamedTuple):
    extents: tuple[Extent, ...]
    num_bytes: int


class Disk:
    """A lender (`zero.lender`), and a home of optimizer states (`expect`, `before`, `after`), of one rank.

    All calls are local. `before` and `after` come from one thread, all others from any.

    Args:
        arrays: the library of the arrays.
        directory: where the file is made.
        kinds: what goes there, of "states", "gradients", "parameters"; the rest is plain memory.
        window_bytes: how much may be in memory: chunks read ahead, in use and not yet written. One chunk always may.
        idle: names of arrays that an update does not touch.
    """

    def __init__(self, arrays: Arrays, directory: Path, kinds: Collection[str], window_bytes: int, *,
                 idle: Collection[str] = ()) -> None:
        self._arrays, self._kinds, self._window, self._idle = arrays, kinds, window_bytes, idle
        self._file = MappedFile(directory)
        self._lent: list[_Lent] = []
        self._addresses: list[int] = []  # ascending, of ...
        self._extents: list[Extent] = []
        self._spans: list[Sequence[Span]] = []
        self._chunks: list[_Chunk] = []
        self._reader = ThreadPoolExecutor(1, "offload-read")
        self._writer = ThreadPoolExecutor(1, "offload-write")
        self._lock = RLock()
        self._ahead: dict[int, Future[None]] = {}
        self._held = 0  # bytes of chunks that are read or in use
        self._behind: deque[tuple[Future[None], int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.num_bytes

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        """See `Lender`. Raises ConfigError where the disk is full."""
        if _KINDS.get(name, "states") not in self._kinds or count == 0:
            return self._arrays.zeros(count, dtype)
        size = dtype_of(dtype).num_bytes
        memory, extent = self._file.map(count * size, f"{name!r} of {count} x {dtype}")
        self._lent.append(_Lent(name, buffer, size, extent))
        at = bisect_right(self._addresses, extent.address)
        self._addresses.insert(at, extent.address)
        self._extents.insert(at, extent)
        self._chunks = []
        return self._arrays.from_memory(memory, dtype)

    # Parts of arrays --------------------------------------------------------------------------------------------------

    def fetch(self, view: Array) -> None:
        """See `Lender`."""
        extent = self._extent_of(view)
        if extent is not None:
            self._reader.submit(self._read, (extent,))

    def release(self, view: Array) -> None:
        """See `Lender`. Blocks while more than a window waits to be written."""
        extent = self._extent_of(view)
        if extent is not None:
            with self._lock:
                self._write_behind((extent,), extent.num_bytes)
                self._make_room(0)

    def settle(self) -> None:
        """See `Lender`."""
        with self._lock:
            self._write_behind(tuple(self._extents), 0)
            while self._behind:
                self._behind.popleft()[0].result()

    def _extent_of(self, view: Array) -> Extent | None:
        memory = self._arrays.memory(view)
        if not len(memory) or not self._addresses:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or address >= self._addresses[at] + self._extents[at].num_bytes:
            return None
        return _pages(self._extents[at], address - self._addresses[at], len(memory))

    # An update --------------------------------------------------------------------------------------------------------

    def expect(self, chunks: Sequence[Sequence[Span]]) -> None:
        """See `optim.home.Home`. What was written so far leaves memory."""
        self._spans, self._chunks = list(chunks), []
        self.settle()

    def before(self, index: int) -> None:
        """See `optim.home.Home`."""
        with self._lock:
            if not self._chunks:
                self._chunks = [self._chunk(spans) for spans in self._spans]
            if index not in self._ahead:
                self._make_room(self._chunks[index].num_bytes)
                self._read_ahead(index)
            now = self._ahead.pop(index)
            for later in range(index + 1, min(index + 1 + _AHEAD, len(self._chunks))):
                if later not in self._ahead and self._fits(self._chunks[later].num_bytes):
                    self._read_ahead(later)
        now.result()

    def after(self, index: int) -> None:
        """See `optim.home.Home`."""
        with self._lock:
            extents, num_bytes = self._chunks[index]
            self._held -= num_bytes
            self._write_behind(extents, num_bytes)

    def _chunk(self, spans: Sequence[Span]) -> _Chunk:
        used = [lent for lent in self._lent if lent.name not in self._idle]
        extents = [_pages(lent.extent, span.start * lent.item_bytes, (span.stop - span.start) * lent.item_bytes)
                   for span in spans for lent in used if lent.buffer == span.buffer]
        return _Chunk(tuple(extents), sum(extent.num_bytes for extent in extents))

    def _read_ahead(self, index: int) -> None:
        extents, num_bytes = self._chunks[index]
        self._held += num_bytes
        self._ahead[index] = self._reader.submit(self._read, extents)

    def _write_behind(self, extents: tuple[Extent, ...], num_bytes: int) -> None:
        self._behind.append((self._writer.submit(self._write, extents), num_bytes))

    def _fits(self, num_bytes: int) -> bool:
        while self._behind and self._behind[0][0].done():
            self._behind.popleft()[0].result()
        return self._held + sum(size for _, size in self._behind) + num_bytes <= self._window

    def _make_room(self, num_bytes: int) -> None:
        while not self._fits(num_bytes) and self._behind:
            self._behind.popleft()[0].result()

    def _read(self, extents: tuple[Extent, ...]) -> None:
        for extent in extents:
            self._file.read(extent)

    def _write(self, extents: tuple[Extent, ...]) -> None:
        for extent in extents:
            self._file.write_out(extent)
            self._file.drop(extent)


def _pages(extent: Extent, start: int, num_bytes: int) -> Extent:
    """The whole pages around some bytes of an extent."""
    first = start // PAGE * PAGE
    last = min(-(-(start + num_bytes) // PAGE) * PAGE, extent.num_bytes)
    return Extent(extent.address + first, extent.offset + first, max(0, last - first))
