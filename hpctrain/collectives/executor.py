"""Carries out one rank's program of a collective plan, message by message.

Owns the cutting of messages into segments, the order in which they are posted, and the arithmetic on what arrives. It
is a state machine: `run` is a generator that yields each request it has to wait for, so that a caller may block on it
or come back later. Knows neither which collective it runs nor which libraries serve it.

Why segments: a received segment is added while it is still in the processor's cache, and the next one is on its way
meanwhile. Two scratch segments are enough, whatever the length of the message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from hpctrain.contracts import Array, Arrays, Request, Transport
from hpctrain.plan.steps import Finish, Program, Receive, Send, Step

__all__ = ["Execution", "Scratch", "Workspace"]

_Waits = Generator[Request, None, None]


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


@dataclass
class Workspace:
    """What a program works on: flat arrays, and what combining means.

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
    source_memory: memoryview = field(init=False)
    target_memory: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.accumulate = self.accumulate or self.dtype
        self.source_memory = self.arrays.memory(self.source)
        self.target_memory = self.source_memory if self.target is self.source else self.arrays.memory(self.target)

    def outgoing(self, start: int, stop: int) -> memoryview:
        """The bytes of [start, stop) to be sent."""
        return self.source_memory[start * self.num_bytes : stop * self.num_bytes]

    def incoming(self, start: int, stop: int) -> memoryview:
        """The bytes that [start, stop) is received into."""
        return self.target_memory[(start - self.offset) * self.num_bytes : (stop - self.offset) * self.num_bytes]

    def home(self, start: int, stop: int) -> Array:
        """The result's elements [start, stop)."""
        return self.target[start - self.offset : stop - self.offset]


class Execution:
    """One program under way over one transport; every message carries `tag`."""

    def __init__(self, program: Program, transport: Transport, tag: int, workspace: Workspace, scratch: Scratch,
                 segment: int) -> None:
        self._program, self._transport, self._tag = program, transport, tag
        self._space, self._scratch, self._segment = workspace, scratch, segment
        #: Intervals that have been added to but not finished, where that needs an array of its own.
        self._sums: dict[tuple[int, int], tuple[Array, memoryview]] = {}
        self._opened: set[tuple[int, int]] = set()

    def run(self) -> _Waits:
        """Yields every request that must be done before it can go on; ends when the program is complete. Local."""
        for step in self._program:
            yield from self._step(step)

    def _step(self, step: Step) -> _Waits:
        pending: list[Request] = []
        combining: list[Receive] = []
        for action in step:
            if isinstance(action, Send):
                for start, stop in self._segments(action.start, action.stop):
                    data = self._space.outgoing(start, stop)
                    pending.append(self._transport.send(data, action.peer, self._tag))
            elif isinstance(action, Finish):
                self._finish(action.start, action.stop)
            elif action.combine:
                combining.append(action)
            else:
                for start, stop in self._segments(action.start, action.stop):
                    data = self._space.incoming(start, stop)
                    pending.append(self._transport.recv(data, action.peer, self._tag))
        for action in combining:
            yield from self._receive_and_combine(action)
        yield from pending

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        # Sender and receiver name the same interval, so both cut it at the same places.
        return ((i, min(i + self._segment, stop)) for i in range(start, stop, self._segment))

    def _receive_and_combine(self, action: Receive) -> _Waits:
        space, arrays = self._space, self._space.arrays
        total = self._open(action.start, action.stop)
        idle = [self._scratch.take(arrays, self._segment, space.dtype) for _ in range(2)]
        posted: deque[tuple[int, int, Array, memoryview, Request]] = deque()
        segments = self._segments(action.start, action.stop)
        try:
            while True:
                while idle and (bounds := next(segments, None)) is not None:
                    start, stop = bounds
                    array, memory = idle.pop()
                    request = self._transport.recv(memory[: (stop - start) * space.num_bytes], action.peer, self._tag)
                    posted.append((start, stop, array, memory, request))
                if not posted:
                    break
                yield posted[0][4]
                start, stop, array, memory, _ = posted.popleft()
                into = total[start - action.start : stop - action.start]
                arrays.combine(space.operation, into, array[: stop - start])
                idle.append((array, memory))
        finally:
            if not posted:  # a buffer that a message may still be written into is never handed out again
                for array, memory in idle:
                    self._scratch.give(arrays, space.dtype, array, memory)

    def _open(self, start: int, stop: int) -> Array:
        """The array in which [start, stop) is summed up, holding this rank's own contribution at first."""
        space = self._space
        key = (start, stop)
        if space.accumulate != space.dtype:
            if key not in self._sums:
                # Rounded up to whole segments, so that few different lengths are ever kept.
                length = -(-(stop - start) // self._segment) * self._segment
                self._sums[key] = self._scratch.take(space.arrays, length, space.accumulate)
                space.arrays.assign(self._sums[key][0][: stop - start], space.source[start:stop])
            return self._sums[key][0][: stop - start]
        if space.target is not space.source and key not in self._opened:
            self._opened.add(key)
            space.arrays.assign(space.home(start, stop), space.source[start:stop])
        return space.home(start, stop)

    def _finish(self, start: int, stop: int) -> None:
        space = self._space
        total = self._open(start, stop)
        if space.factor is not None:
            space.arrays.scale(total, space.factor)
        if space.accumulate != space.dtype:
            space.arrays.assign(space.home(start, stop), total)
            self._scratch.give(space.arrays, space.accumulate, *self._sums.pop((start, stop)))
