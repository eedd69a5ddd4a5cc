"""Carries out one rank's program of a collective plan, message by message.

Owns the cutting of messages into segments, the order in which they are posted, and the arithmetic on what arrives. It
is a state machine: `run` is a generator that yields each request it has to wait for, so that a caller may block on it
or come back later. Knows neither which collective it runs nor which libraries serve it.

Why segments: a received segment is added while it is still in the processor's cache, and the next one is on its way
meanwhile. Two scratch segments are enough, whatever the length of the message. A message of several intervals is packed
and goes in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

from hpctrain.collectives.workspace import Blocks, Scratch, Workspace
from hpctrain.contracts import Array, Request, Transport
from hpctrain.plan.steps import Finish, Program, Receive, Send, Step

__all__ = ["Execution"]

_Waits = Generator[Request, None, None]
_Sent = list[tuple[int, int, Request]]  # segments on their way out: start, stop, request
_WINDOW = 4  # receives under way at a time where one interval comes from many ranks


class Execution:
    """One program under way over one transport; every message carries `tag`."""

    def __init__(self, program: Program, transport: Transport, tag: int, space: Workspace | Blocks, scratch: Scratch,
                 segment: int) -> None:
        self._program, self._transport, self._tag = program, transport, tag
        self._space, self._scratch, self._segment = space, scratch, segment
        #: Intervals that have been added to but not finished, where that needs an array of its own.
        self._sums: dict[tuple[int, int], tuple[Array, memoryview]] = {}
        self._opened: set[tuple[int, int]] = set()

    def run(self) -> _Waits:
        """Yields every request that must be done before it can go on; ends when the program is complete. Local."""
        for step in self._program:
            yield from self._step(step)

    def _step(self, step: Step) -> _Waits:
        pending: list[Request] = []
        sent: _Sent = []
        combining: list[Receive] = []
        unpacking: list[tuple[bytearray, list[memoryview]]] = []
        for action in step:
            if isinstance(action, Send):
                self._send(action, sent)
            elif isinstance(action, Finish):
                self._finish(action.start, action.stop)
            elif action.combine:
                combining.append(action)
            else:
                self._receive(action, pending, unpacking)
        if len(combining) == 1:
            yield from self._receive_and_combine(combining[0], sent)
        elif combining:
            intervals = dict.fromkeys((action.start, action.stop) for action in combining)
            for interval in intervals:
                group = [action for action in combining if (action.start, action.stop) == interval]
                yield from (self._receive_in_order(group, sent) if group[1:] else
                            self._receive_and_combine(group[0], sent))
        for request in pending:
            yield request
        for _, _, request in sent:
            yield request
        for packed, views in unpacking:
            _unpack(packed, views)

    # Messages -------------------------------------------------------------------------------------------------------

    def _send(self, action: Send, sent: _Sent) -> None:
        if action.rest:
            views = [view for piece in action.pieces for view in self._space.outgoing(*piece)]
            sent.append((action.start, action.stop, self._post(views, action.peer)))
            return
        for start, stop in self._segments(action.start, action.stop):
            sent.append((start, stop, self._post(self._space.outgoing(start, stop), action.peer)))

    def _post(self, views: Sequence[memoryview], peer: int) -> Request:
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        return self._transport.send(data, peer, self._tag)

    def _receive(self, action: Receive, pending: list[Request],
                 unpacking: list[tuple[bytearray, list[memoryview]]]) -> None:
        # Sender and receiver name the same intervals, so both pack and cut in the same way.
        messages = [action.pieces] if action.rest else [(s,) for s in self._segments(action.start, action.stop)]
        for message in messages:
            views = [view for piece in message for view in self._space.incoming(*piece)]
            data = views[0]
            if len(views) > 1:
                packed = bytearray(sum(map(len, views)))
                unpacking.append((packed, views))
                data = memoryview(packed)
            pending.append(self._transport.recv(data, action.peer, self._tag))

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return ((i, min(i + self._segment, stop)) for i in range(start, stop, self._segment))

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def _receive_and_combine(self, action: Receive, sent: _Sent) -> _Waits:
        space = self._workspace()
        arrays = space.arrays
        total = self._open(action.start, action.stop)
        read = self._still_read(action, sent) if sent else sent
        num_scratch = 1 if action.stop - action.start <= self._segment else 2
        idle = [self._scratch.take(arrays, self._segment, space.dtype) for _ in range(num_scratch)]
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
                if read:
                    yield from _overlapping(read, start, stop)
                into = total[start - action.start : stop - action.start]
                arrays.combine(space.operation, into, array[: stop - start])
                idle.append((array, memory))
        finally:
            if not posted:  # a buffer that a message may still be written into is never handed out again
                for array, memory in idle:
                    self._scratch.give(arrays, space.dtype, array, memory)

    def _receive_in_order(self, actions: list[Receive], sent: _Sent) -> _Waits:
        """Adds up what several ranks send for one interval in the order of ranks, this rank's value at its place."""
        space, rank = self._workspace(), self._transport.rank
        arrays, first = space.arrays, actions[0]
        total = self._open(first.start, first.stop)
        read = self._still_read(first, sent)
        peers = sorted(action.peer for action in actions)
        order = sorted([*peers, rank])
        idle = [self._scratch.take(arrays, self._segment, space.dtype) for _ in range(min(_WINDOW, len(peers)))]
        partial = self._scratch.take(arrays, self._segment, space.accumulate)
        wanted = ((start, stop, peer) for start, stop in self._segments(first.start, first.stop) for peer in peers)
        posted: deque[tuple[Array, memoryview, Request]] = deque()
        try:
            for start, stop in self._segments(first.start, first.stop):
                own = total[start - first.start : stop - first.start]
                running = partial[0][: stop - start]
                for place, peer in enumerate(order):
                    value = own
                    if peer != rank:
                        while idle and (message := next(wanted, None)) is not None:
                            array, memory = idle.pop()
                            data = memory[: (message[1] - message[0]) * space.num_bytes]
                            posted.append((array, memory, self._transport.recv(data, message[2], self._tag)))
                        yield posted[0][2]
                        value = posted[0][0][: stop - start]
                    if place == 0:
                        arrays.assign(running, value)
                    else:
                        arrays.combine(space.operation, running, value)
                    if peer != rank:
                        idle.append(posted.popleft()[:2])
                yield from _overlapping(read, start, stop)
                arrays.assign(own, running)
        finally:
            if not posted:
                for array, memory in idle:
                    self._scratch.give(arrays, space.dtype, array, memory)
            self._scratch.give(arrays, space.accumulate, *partial)

    def _still_read(self, action: Receive, sent: _Sent) -> _Sent:
        """The sends of this step that read what `action` changes."""
        space = self._workspace()
        if space.accumulate != space.dtype or space.target is not space.source:
            return []
        return [s for s in sent if s[0] < action.stop and action.start < s[1]]

    def _open(self, start: int, stop: int) -> Array:
        """The array in which [start, stop) is summed up, holding this rank's own contribution at first."""
        space = self._workspace()
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
        space = self._workspace()
        if space.factor is None and space.target is space.source and space.accumulate == space.dtype:
            return
        total = self._open(start, stop)
        if space.factor is not None:
            space.arrays.scale(total, space.factor)
        if space.accumulate != space.dtype:
            space.arrays.assign(space.home(start, stop), total)
            self._scratch.give(space.arrays, space.accumulate, *self._sums.pop((start, stop)))

    def _workspace(self) -> Workspace:
        assert isinstance(self._space, Workspace), "only a workspace of flat arrays can be reduced"
        return self._space


def _overlapping(sent: _Sent, start: int, stop: int) -> _Waits:
    for first, last, request in sent:
        if first < stop and start < last:
            yield request


def _unpack(packed: bytearray, views: list[memoryview]) -> None:
    memory, at = memoryview(packed), 0
    for view in views:
        view[:] = memory[at : at + len(view)]
        at += len(view)
