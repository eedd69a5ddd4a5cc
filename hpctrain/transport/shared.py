"""Memory that all ranks of one node see: allocations in which a rank reads and writes its neighbours' part.

    one file of /dev/shm, mapped by every rank       | rank 0's part | rank 1's part | rank 2's part |

Owns these files and the table of what is mapped where. Must not know who sends what. The file loses its name as soon as
all ranks have it open, so a crash leaves nothing behind: the memory goes with the last process that maps it. Each rank
claims the pages of its own part, from its own cores, so they lie in its own NUMA domain.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import time
import weakref
from pathlib import Path
from typing import Any

from hpctrain.contracts import Shared

__all__ = ["FOLDER", "NodeMemory"]

FOLDER = Path("/dev/shm")
_PREFIX = "hpctrain-"
_STALE = 60.0  # seconds after which a name whose process is gone was left by a crash


class NodeMemory:
    """The shared allocations of one communicator whose ranks are all on this node."""

    def __init__(self, communicator: Any, folder: Path = FOLDER) -> None:
        self._communicator = communicator
        self._folder = folder
        self._regions: dict[int, tuple[weakref.ref[mmap.mmap], int, int]] = {}  # number: (mapping, address, part)
        self._num_regions = 0

    def __len__(self) -> int:
        """Allocations made so far; the same on all ranks."""
        return self._num_regions

    def allocate(self, num_bytes: int) -> memoryview | str:
        """This rank's part of a new allocation, zeroed; or, on all ranks alike, why there is none. Collective."""
        comm = self._communicator
        part = -(-max(1, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        parts = comm.allgather(part)
        name = comm.bcast(self._fresh_name() if comm.rank == 0 else None)
        path, start = self._folder / name, sum(parts[: comm.rank])
        mapping, problem = None, ""
        try:
            if comm.rank == 0:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            problem = str(error)
        comm.Barrier()
        try:
            if not problem:
                mapping = _map(path, start, part, sum(parts))
        except OSError as error:
            problem = str(error)
        problems = [p for p in comm.allgather(problem) if p]
        if comm.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if problems or mapping is None:
            return problems[0]
        self._num_regions += 1
        self._regions[self._num_regions] = (weakref.ref(mapping), _address(memoryview(mapping)), max(parts))
        if len(set(parts)) > 1:  # ranks that allocate differently share nothing: offsets would mean different things
            del self._regions[self._num_regions]
        return memoryview(mapping)[start : start + num_bytes]

    def find(self, memory: memoryview) -> Shared | None:
        """The stretch that `memory` is, on every rank; None where it is not inside one allocation. Local."""
        size = self._communicator.size
        if not self._regions or memory.readonly or not len(memory):
            return None
        address = _address(memory)
        for number, (reference, base, part) in list(self._regions.items()):
            mapping = reference()
            if mapping is None:
                del self._regions[number]
                continue
            offset = address - base - self._communicator.rank * part
            if offset >= 0 and offset + len(memory) <= part:
                whole = memoryview(mapping)
                views = tuple(whole[r * part + offset : r * part + offset + len(memory)] for r in range(size))
                return Shared((number, offset), views)
        return None

    def _fresh_name(self) -> str:
        """A name of our own, after removing those that crashed jobs left between creation and loss of the name."""
        for path in self._folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError):
                told = path.stat()
                if told.st_uid == os.getuid() and time.time() - told.st_mtime > _STALE and not _alive(path.name):
                    path.unlink()
        return f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _alive(name: str) -> bool:
    return Path(f"/proc/{int(name.removeprefix(_PREFIX).split('-')[0])}").exists()


def _map(path: Path, start: int, part: int, total: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        # Claims the pages now: later, a full /dev/shm would be a bus error instead of an OSError.
        os.posix_fallocate(descriptor, start, part)
        if os.fstat(descriptor).st_size < total:
            os.ftruncate(descriptor, total)
        return mmap.mmap(descriptor, total)
    finally:
        os.close(descriptor)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
