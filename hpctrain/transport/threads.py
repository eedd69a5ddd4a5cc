"""N ranks as threads of one process, and the one rank of a process without MPI.

Owns message passing through shared memory with rendezvous: a send is done only when its receiver has copied, the
strictest behaviour that an MPI library may show. Knows no MPI. Made for tests and for runs of a single process;
Python's lock keeps threads from being fast.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.contracts import Native, Place
from hpctrain.errors import TransportError
from hpctrain.transport.memory import allocate
from hpctrain.transport.places import Allocation, Places, Table

__all__ = ["ThreadsTransport", "run_threads", "single"]

_Route = tuple[tuple[Any, ...], int, int, int]  # group, source, destination, tag


class _World:
    """What all ranks share: posted messages, the first failure, and the lock that guards both."""

    def __init__(self, timeout: float, on_abort: Callable[[int], None] | None = None) -> None:
        self.changed = threading.Condition()
        self.sends: _Posted = defaultdict(deque)
        self.receives: _Posted = defaultdict(deque)
        self.failure: tuple[int, BaseException] | None = None
        self.allocations: dict[Any, dict[int, _Part]] = defaultdict(dict)  # (group, its allocations so far): by rank
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

    def share(self, key: Any, rank: int, size: int, part: _Part) -> dict[int, _Part]:
        """Waits until all ranks of the group have come with their part of an allocation; gives all parts."""
        deadline = time.monotonic() + self.timeout
        with self.changed:
            self.allocations[key][rank] = part
            self.changed.notify_all()
            while len(self.allocations[key]) < size:
                self.check()
                if not self.changed.wait(deadline - time.monotonic()):
                    raise TransportError(f"only {len(self.allocations[key])} of {size} ranks came to allocate")
            return self.allocations[key]

    def check(self) -> None:
        if self.failure is not None:
            rank, error = self.failure
            raise TransportError(f"rank {rank} failed: {type(error).__name__}: {error}") from error


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


@dataclass(frozen=True)
class _Part:
    """One rank's part of an allocation, and the highest number of an allocation that the rank knew then."""

    memory: mmap.mmap
    num_bytes: int
    last: int


class ThreadsTransport:
    """See `hpctrain.contracts.Transport`. Used by the thread that is the rank, and by one that moves its works on."""

    name = "threads"
    native: Native | None = None
    concurrent = True

    def __init__(self, world: _World, group: tuple[Any, ...], places: Places, rank: int) -> None:
        self.rank, self.size = rank, len(places.ranks)
        self._world, self._group, self._places = world, group, places
        self._num_subgroups = 0
        self._num_allocations = 0
        self._closed = False

    def allocate(self, num_bytes: int) -> memoryview:
        places, table = self._places, self._places.table
        if not places.possible or num_bytes == 0:
            return allocate(num_bytes)
        self._num_allocations += 1
        memory = mmap.mmap(-1, num_bytes)
        key = (self._group, self._num_allocations)
        told = self._world.share(key, self.rank, self.size, _Part(memory, num_bytes, table.last))
        if len({part.num_bytes for part in told.values()}) > 1:  # offsets would mean different things
            return memoryview(memory)
        number = 1 + max(part.last for part in told.values())
        near = [rank for rank in places.node_ranks if rank != self.rank]
        parts = {places.ranks[rank]: (told[rank].memory, 0) for rank in near}
        return table.add(Allocation(number, places.everyone, num_bytes, lambda: memory, parts, {table.rank}))

    def allocate_node(self, num_bytes: int) -> memoryview | None:
        if num_bytes == 0 or not self._places.possible:
            return allocate(num_bytes)
        self._num_allocations += 1
        part = _Part(mmap.mmap(-1, num_bytes), num_bytes, self._places.table.last)
        told = self._world.share((self._group, self._num_allocations), self.rank, self.size, part)
        return memoryview(told[self._places.node_ranks[0]].memory)

    @property
    def shares(self) -> bool:
        return self._places.shares

    def place(self, memory: memoryview) -> Place | None:
        return self._places.place(memory)

    def view(self, rank: int, place: Place, num_bytes: int) -> memoryview:
        return self._places.view(rank, place, num_bytes)

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
        rank = list(ranks).index(self.rank)
        return ThreadsTransport(self._world, name, self._places.subgroup(ranks, rank), rank)

    def node_ranks(self) -> tuple[int, ...]:
        return self._places.node_ranks

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
    return ThreadsTransport(_World(timeout=60.0, on_abort=_exit), (), Places(Table(0), (0,), (0,), 0), 0)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_threads(num_ranks: int, function: Callable[[ThreadsTransport], Any], *, timeout: float = 60.0,
                ranks_per_node: int | None = None) -> list[Any]:
    """Runs `function(transport)` as `num_ranks` ranks, one thread each, and returns their results in rank order.

    When a rank fails, all others are woken with TransportError and the error of the rank that failed first is raised.
    `timeout` (seconds) bounds each wait for a message, so that a test never hangs. `ranks_per_node` imitates nodes: so
    many consecutive ranks count as one, the last few as a smaller one.
    """
    world = _World(timeout)
    nodes = [rank // (ranks_per_node or num_ranks) for rank in range(num_ranks)]
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            places = Places(Table(rank), range(num_ranks), nodes, rank)
            results[rank] = function(ThreadsTransport(world, (), places, rank))
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
