"""N ranks as threads of one process, and the one rank of a process without MPI.

Owns message passing through shared memory with rendezvous: a send is done only when its receiver has copied, the
strictest behaviour that an MPI library may show. Knows no MPI. Made for tests and for runs of a single process;
Python's lock keeps threads from being fast.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.contracts import Place
from hpctrain.errors import TransportError
from hpctrain.transport.memory import allocate

__all__ = ["ThreadsTransport", "run_threads", "single"]

_Route = tuple[tuple[Any, ...], int, int, int]  # group, source, destination, tag


class _World:
    """What all ranks share: posted messages, the first failure, and the lock that guards both."""

    def __init__(self, timeout: float, on_abort: Callable[[int], None] | None = None) -> None:
        self.changed = threading.Condition()
        self.sends: _Posted = defaultdict(deque)
        self.receives: _Posted = defaultdict(deque)
        self.failure: tuple[int, BaseException] | None = None
        self.allocations: dict[Any, _Allocation] = {}  # by (group, number)
        self.timeout = timeout
        self.on_abort = on_abort

    def fail(self, rank: int, error: BaseException) -> None:
        """Wakes every rank that waits; each raises TransportError from then on."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()

    def post(self, message: _Message, mine: _Posted, theirs: _Posted) -> None:
        """Copies if the partner is there already, otherwise leaves the message in `mine`."""
        with self.changed:
            self.check()
            if theirs[message.route]:
                other = theirs[message.route].popleft()
                sent, received = (message, other) if mine is self.sends else (other, message)
                _copy(sent, received)
                self.changed.notify_all()
            else:
                mine[message.route].append(message)

    def share(self, key: Any, rank: int, size: int, num_bytes: int) -> memoryview:
        """Waits until all ranks of the group have come for their part of an allocation: one block, cut at pages."""
        deadline = time.monotonic() + self.timeout
        part = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.changed:
            if key not in self.allocations:
                self.allocations[key] = _Allocation(allocate(part * size), part, num_bytes)
            whole = self.allocations[key]
            assert whole.num_bytes == num_bytes, "every rank asks for the same number"
            whole.num_ranks += 1
            self.changed.notify_all()
            while whole.num_ranks < size:
                self.check()
                if not self.changed.wait(deadline - time.monotonic()):
                    raise TransportError(f"only {whole.num_ranks} of {size} ranks came to allocate")
        return whole.memory[rank * part : rank * part + num_bytes]

    def check(self) -> None:
        if self.failure is not None:
            rank, error = self.failure
            raise TransportError(f"rank {rank} failed: {type(error).__name__}: {error}") from error


@dataclass
class _Allocation:
    """One block with a part of whole pages for each rank, of which `num_bytes` were asked for."""

    memory: memoryview
    part: int
    num_bytes: int
    num_ranks: int = 0  # that have come


class _Message:
    """One posted send or receive; fulfils `contracts.Request`."""

    def __init__(self, world: _World, route: _Route, data: memoryview) -> None:
        self.world, self.route, self.data = world, route, data
        self.finished = False
        self.error = ""

    def done(self) -> bool:
        if not self.finished:
            with self.world.changed:
                self.world.check()
        if self.error:
            raise TransportError(self.error)
        return self.finished

    def wait(self) -> None:
        deadline = time.monotonic() + self.world.timeout
        with self.world.changed:
            while not self.finished:
                self.world.check()
                if not self.world.changed.wait(deadline - time.monotonic()) and not self.finished:
                    _, source, destination, tag = self.route
                    raise TransportError(
                        f"no partner within {self.world.timeout:g} s for the message of {len(self.data)} bytes "
                        f"from rank {source} to rank {destination} with tag {tag}"
                    )
        if self.error:
            raise TransportError(self.error)


_Posted = dict[_Route, deque[_Message]]


class ThreadsTransport:
    """See `hpctrain.contracts.Transport`. Used by one thread, the one that is the rank."""

    name = "threads"
    native = None

    def __init__(self, world: _World, group: tuple[Any, ...], rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._world, self._group = world, group
        self._num_subgroups = 0
        self._num_allocations = 0
        self._closed = False

    def allocate(self, num_bytes: int) -> memoryview:
        self._num_allocations += 1
        return self._world.share((self._group, self._num_allocations), self.rank, self.size, num_bytes)

    @property
    def shares(self) -> bool:
        return self._num_allocations > 0

    def place(self, memory: memoryview) -> Place | None:
        if not len(memory) or memory.readonly:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for number in range(1, self._num_allocations + 1):
            whole = self._world.allocations[self._group, number]
            if not whole.part:
                continue
            offset = address - ctypes.addressof(ctypes.c_char.from_buffer(whole.memory)) - self.rank * whole.part
            if offset >= 0 and offset + len(memory) <= whole.num_bytes:
                return number, offset
        return None

    def view(self, rank: int, place: Place, num_bytes: int) -> memoryview:
        whole = self._world.allocations[self._group, place[0]]
        start = rank * whole.part + place[1]
        return whole.memory[start : start + num_bytes]

    def send(self, data: memoryview, destination: int, tag: int) -> _Message:
        return self._post(data, (self._group, self.rank, destination, tag), destination, self._world.sends)

    def recv(self, data: memoryview, source: int, tag: int) -> _Message:
        return self._post(data, (self._group, source, self.rank, tag), source, self._world.receives)

    def subgroup(self, ranks: Sequence[int]) -> ThreadsTransport | None:
        # Collective calls come in the same order on all ranks, so their number makes the new group's name unique.
        self._num_subgroups += 1
        if self.rank not in ranks:
            return None
        name = (self._group, self._num_subgroups, tuple(ranks))
        return ThreadsTransport(self._world, name, list(ranks).index(self.rank), len(ranks))

    def node_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def abort(self, code: int) -> None:
        if self._world.on_abort is not None:
            self._world.on_abort(code)
        error = TransportError(f"the job was aborted with exit status {code}")
        self._world.fail(self.rank, error)
        raise error

    def close(self) -> None:
        self._closed = True

    def _post(self, data: memoryview, route: _Route, peer: int, mine: _Posted) -> _Message:
        assert 0 <= peer < self.size, f"rank {peer} is not in this group of {self.size}"
        assert 0 <= route[-1] < 32768, f"tag {route[-1]} must be in 0..32767"
        if self._closed:
            raise TransportError("the transport is closed")
        world = self._world
        message = _Message(world, route, data)
        world.post(message, mine, world.receives if mine is world.sends else world.sends)
        return message


def _copy(sent: _Message, received: _Message) -> None:
    if len(sent.data) == len(received.data):
        received.data[:] = sent.data
    else:
        text = f"a message of {len(sent.data)} bytes met a receive of {len(received.data)} bytes"
        sent.error = received.error = f"{text} (from rank {sent.route[1]} to {sent.route[2]}, tag {sent.route[3]})"
    sent.finished = received.finished = True


def single() -> ThreadsTransport:
    """The transport of a process that is alone. `abort` ends the process."""
    return ThreadsTransport(_World(timeout=60.0, on_abort=_exit), (), 0, 1)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_threads(num_ranks: int, function: Callable[[ThreadsTransport], Any], *, timeout: float = 60.0) -> list[Any]:
    """Runs `function(transport)` as `num_ranks` ranks, one thread each, and returns their results in rank order.

    When a rank fails, all others are woken with TransportError and the error of the rank that failed first is raised.
    `timeout` (seconds) bounds each wait for a message, so that a test never hangs.
    """
    world = _World(timeout)
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadsTransport(world, (), rank, num_ranks))
        except BaseException as error:  # noqa: BLE001 - a rank's end, whatever it is, must reach the others
            world.fail(rank, error)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure[1]
    return results
