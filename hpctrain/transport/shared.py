"""Memory that all ranks of one node see: allocations in which a rank reads and writes its neighbours' part.

    one file of /dev/shm, mapped by every rank       | rank 0's part | rank 1's part | rank 2's part |

Owns these files: one a node and allocation. Must not know who sends what. The file loses its name as soon as all ranks
have it open, so a crash leaves nothing behind: the memory goes with the last process that maps it. Each rank claims the
pages of its own part, from its own cores, so they lie in its own NUMA domain, and gives them back with the last view of
it; the mappings are given up in a later allocation, in which all ranks tell what they still hold.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.transport.places import Allocation, Places

__all__ = ["FOLDER", "NodeMemory"]

FOLDER = Path("/dev/shm")
_PREFIX = "hpctrain-"
_STALE = 60.0  # seconds after which a name whose process is gone was left by a crash
_REMOVE = getattr(mmap, "MADV_REMOVE", None)  # Linux's alone


class _Told(NamedTuple):
    """What each rank says first: how much it wants, the node's file, why there is none, what it has and knows."""

    num_bytes: int
    name: str
    problem: str
    last: int
    held: tuple[int, ...]


class NodeMemory:
    """Shared allocations of one group: of each node's ranks together, made by the whole group at once."""

    def __init__(self, communicator: Any, places: Places, folder: Path = FOLDER) -> None:
        """`places` are those of the communicator's ranks, in their order."""
        self._communicator, self._places = communicator, places
        self._folder = folder

    def allocate(self, num_bytes: int) -> memoryview | str:
        """This rank's part of a new allocation, zeroed; or, on all ranks alike, why there is none. Collective."""
        places = self._places
        table = places.table
        told, mapped = self._make(num_bytes)
        if isinstance(mapped, str):
            return mapped
        if len({t.num_bytes for t in told}) > 1:  # offsets would mean different things
            return memoryview(mapped.own)[:num_bytes]
        others = {places.ranks[rank]: (mapped.whole, start)
                  for rank, start in zip(places.node_ranks, mapped.starts) if rank != self._communicator.rank}
        holders = {places.ranks[rank] for rank in places.node_ranks}
        own = weakref.ref(mapped.own, mapped.giving_back())
        number = 1 + max(t.last for t in told)
        return table.add(Allocation(number, places.everyone, num_bytes, own, others, holders))

    def allocate_together(self, num_bytes: int) -> memoryview | str:
        """Memory of `num_bytes` for all ranks of this node, each claiming an equal part; or why there is none."""
        _, mapped = self._make(-(-num_bytes // len(self._places.node_ranks)))
        return mapped if isinstance(mapped, str) else memoryview(mapped.whole)[:num_bytes]

    def _make(self, num_bytes: int) -> tuple[list[_Told], _Mapped | str]:
        """What all ranks told, and this node's new file as mapped here, with a part of `num_bytes` for this rank."""
        comm, places = self._communicator, self._places
        table = places.table
        first = comm.rank == places.node_ranks[0]
        name, problem = self._create() if first else ("", "")
        told = [_Told(*t) for t in comm.allgather(tuple(_Told(num_bytes, name, problem, table.last, table.held())))]
        table.learn({places.ranks[rank]: t.held for rank, t in enumerate(told)})
        path = self._folder / told[places.node_ranks[0]].name
        node = [told[rank].num_bytes for rank in places.node_ranks]
        problem = next((t.problem for t in told if t.problem), "")
        mapped = None
        try:
            if not problem:
                mapped = _map(path, node, places.node_ranks.index(comm.rank))
        except OSError as error:
            problem = str(error)
        problems = [p for p in comm.allgather(problem) if p]
        if first:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return told, problems[0] if problems or mapped is None else mapped

    def _create(self) -> tuple[str, str]:
        """(name of a new empty file, ""), or ("", why there is none)."""
        name = self._fresh_name()
        try:
            os.close(os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            return "", str(error)
        return name, ""

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


class _Mapped(NamedTuple):
    """One file as this rank maps it: its own part for its user, and all of it to reach the neighbours' parts."""

    own: mmap.mmap
    whole: mmap.mmap
    starts: list[int]
    mine: int  # which of the parts

    def giving_back(self) -> Callable[[object], None]:
        """What returns the pages of this rank's part to the system, also while others keep the file alive."""
        whole, start, length = self.whole, self.starts[self.mine], len(self.own)

        def give_back(own: object) -> None:
            if _REMOVE is not None:
                with contextlib.suppress(OSError):
                    whole.madvise(_REMOVE, start, length)

        return give_back


def _map(path: Path, lengths: Sequence[int], index: int) -> _Mapped:
    """Part `index` of a file with parts of (at least) these lengths, each beginning on a page."""
    parts = [-(-max(1, length) // mmap.PAGESIZE) * mmap.PAGESIZE for length in lengths]
    starts = [0, *accumulate(parts)]
    descriptor = os.open(path, os.O_RDWR)
    try:
        # Claims the pages now: later, a full /dev/shm would be a bus error instead of an OSError.
        os.posix_fallocate(descriptor, starts[index], parts[index])
        if os.fstat(descriptor).st_size < starts[-1]:
            os.ftruncate(descriptor, starts[-1])
        own = mmap.mmap(descriptor, parts[index], offset=starts[index])
        return _Mapped(own, mmap.mmap(descriptor, starts[-1]), starts[:-1], index)
    finally:
        os.close(descriptor)
