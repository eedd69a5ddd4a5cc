"""What this rank did last: a short memory of its collectives, for the day on which one does not end.

Owns the records and the counting of time spent blocked. A group tells its `Channel` when a collective starts, blocks
and ends. Local: nothing here talks to another rank, and nothing decides what is too long. Bounded: a channel keeps
its last `LENGTH` operations and forgets the others.

    sequence   1 2 3 ... on each group, the same collective on every rank if the program is right
    started    the call was made; its messages may be under way
    waiting    the rank is blocked until it is done         working    the rank runs the function of an `on_root`
    finished   this rank's part is done

Written by the rank's own thread, read by the watchdog's: a record is complete before it is in the ring. A progress
thread may call `finished`, for an operation in which the rank is not blocked: what is blocked, the rank alone moves on.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hpctrain.collectives.callers import Caller, CallerFinder
from hpctrain.contracts import Transport

__all__ = ["LENGTH", "Channel", "Message", "Observer", "Operation", "Recorder"]

LENGTH = 128  # operations that each group remembers


class Observer(Protocol):
    """What a group tells about its collectives. Made for one group; `finished` may come from a progress thread."""

    def started(self, operation: str, dtype: str = "", count: int = 0, name: str = "") -> int:
        """A collective begins; gives its sequence number. What is passed, but `name`, is equal on all ranks."""

    def waiting(self, sequence: int) -> None:
        """From now on the rank is blocked in it."""

    def working(self, sequence: int) -> None:
        """From now on this rank does its own work, while others may wait for it."""

    def finished(self, sequence: int) -> None:
        """It is over for this rank, well or with an error."""

    def message(self, operation: str, dtype: str, count: int) -> Message:
        """A message to or from one other rank begins."""

    def subgroup(self, ranks: Sequence[int], transport: Transport | None) -> Observer:
        """The observer of a new subgroup; made on every rank of this group, `transport` None outside of it."""

    def close(self) -> None:
        """The group is closed. Collective over the group."""


class Message(Protocol):
    """What a group tells about one message; it has no sequence number, since other ranks have no part in it."""

    def waiting(self) -> None:
        """From now on the rank is blocked in it."""

    def finished(self) -> None:
        """It has arrived, or may be overwritten."""


class Operation:
    """One collective, or message (sequence 0), of one rank. Times are seconds of `time.monotonic`; 0 = not yet."""

    __slots__ = ("begun", "blocked", "by", "count", "dtype", "ended", "name", "operation", "phase", "sequence", "state")

    def __init__(self, sequence: int, operation: str, dtype: str, count: int, name: str, by: Caller,
                 phase: str) -> None:
        self.sequence, self.operation, self.dtype, self.count, self.name = sequence, operation, dtype, count, name
        self.by, self.phase = by, phase
        self.state = "started"
        self.begun = time.monotonic()
        self.blocked = self.ended = 0.0


class Recorder:
    """The records of one rank over all its groups, and the phase that its program is in. One a process.

    Attributes:
        blocked_seconds: time spent blocked in collectives since the start.
        phase, phase_since: what the program is doing: "init", "data", "step", "checkpoint".
        last_event: when anything here changed last.
    """

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.blocked_seconds = 0.0
        self.phase = "init"
        self.last_event = self.phase_since = time.monotonic()
        self.caller: Caller | None = None  # of the phase, if it was entered by a call
        self.finder = CallerFinder()
        self._channels: list[weakref.ref[Channel]] = []

    def channel(self, group: str, ranks: Sequence[int]) -> Channel:
        """A new group's channel; `ranks` are those of the world. It is forgotten with its group."""
        made = Channel(self, group, tuple(ranks))
        self._channels = [ref for ref in self._channels if ref() is not None] + [weakref.ref(made)]
        return made

    def channels(self) -> list[Channel]:
        """Those of the groups that are there."""
        return [channel for ref in self._channels if (channel := ref()) is not None]

    def enter(self, phase: str) -> None:
        """The program goes over to `phase`."""
        self.phase, self.last_event = phase, time.monotonic()
        self.phase_since = self.last_event

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`phase` for the body, which is one call by the user: its line is that of every collective in it."""
        before, by = self.phase, self.caller
        if by is None:
            self.caller = self.finder.find()
        self.enter(phase)
        try:
            yield
        finally:
            self.caller = by
            self.enter(before)


class Channel:
    """The observer of one group; see `Observer`. `current` is the operation in which the rank is blocked or at work."""

    def __init__(self, recorder: Recorder, group: str, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks
        self.recorder = recorder
        self.current: Operation | None = None
        self.count = 0
        self._num_subgroups = 0
        self._ring: list[Operation | None] = [None] * recorder.length
        self._messages: deque[Operation] = deque(maxlen=recorder.length)

    def started(self, operation: str, dtype: str = "", count: int = 0, name: str = "") -> int:
        recorder = self.recorder
        by = recorder.caller or recorder.finder.find()
        made = Operation(self.count + 1, operation, dtype, count, name, by, recorder.phase)
        self._ring[self.count % len(self._ring)] = made
        self.count += 1
        self.current = None
        recorder.last_event = made.begun
        return made.sequence

    def waiting(self, sequence: int) -> None:
        self._set(sequence, "waiting")

    def working(self, sequence: int) -> None:
        self._set(sequence, "working")

    def finished(self, sequence: int) -> None:
        operation = self._ring[(sequence - 1) % len(self._ring)]
        if operation is None or operation.sequence != sequence:
            return  # so many have started since that it is forgotten
        self.end(operation)

    def message(self, operation: str, dtype: str, count: int) -> RecordedMessage:
        by = self.recorder.caller or self.recorder.finder.find()
        made = Operation(0, operation, dtype, count, "", by, self.recorder.phase)
        self._messages.append(made)
        self.recorder.last_event = made.begun
        return RecordedMessage(self, made)

    def resumed(self, sequence: int) -> None:
        """It goes on after a wait, and is neither blocked nor done."""
        self._set(sequence, "started")

    def subgroup(self, ranks: Sequence[int], transport: Transport | None) -> Channel:
        return self.recorder.channel(*self.subgroup_name(ranks))

    def subgroup_name(self, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """(name, ranks of the world) of the next subgroup; the same on all its ranks."""
        self._num_subgroups += 1
        return f"{self.group}.{self._num_subgroups}", tuple(self.ranks[rank] for rank in ranks)

    def close(self) -> None:
        self.current = None

    @property
    def latest(self) -> Operation:
        """The collective that began last; there must be one."""
        found = self._ring[(self.count - 1) % len(self._ring)]
        assert found is not None
        return found

    def tail(self) -> list[Operation]:
        """The operations that are remembered, oldest first."""
        first = max(0, self.count - len(self._ring))
        found = [self._ring[i % len(self._ring)] for i in range(first, self.count)]
        operations = [operation for operation in found if operation is not None]
        return sorted([*operations, *self._messages], key=lambda operation: operation.begun)

    def mark(self, operation: Operation, state: str) -> None:
        """`operation` comes to `state`, which is not its end."""
        now = time.monotonic()
        if self.current is not None:
            self._unblock(now)
        operation.state = state
        if state != "started":
            operation.blocked = now
            self.current = operation
        self.recorder.last_event = now

    def end(self, operation: Operation) -> None:
        """`operation` is over."""
        operation.ended = self.recorder.last_event = time.monotonic()
        if operation is self.current:
            self._unblock(operation.ended)
        operation.state = "finished"

    def _set(self, sequence: int, state: str) -> None:
        operation = self._ring[(sequence - 1) % len(self._ring)]
        if operation is None or operation.sequence != sequence:
            return
        self.mark(operation, state)

    def _unblock(self, now: float) -> None:
        assert self.current is not None
        if self.current.state != "working":
            self.recorder.blocked_seconds += now - self.current.blocked
        self.current = None


class RecordedMessage:
    """See `Message`."""

    __slots__ = ("_channel", "_operation")

    def __init__(self, channel: Channel, operation: Operation) -> None:
        self._channel, self._operation = channel, operation

    def waiting(self) -> None:
        self._channel.mark(self._operation, "waiting")

    def finished(self) -> None:
        self._channel.end(self._operation)
