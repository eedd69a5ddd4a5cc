"""Asynchronous collectives: what is under way, and in which order it may be waited for.

Owns the queue of works of one group. A work is a generator of requests (see `executor`); the queue resumes it when the
request it waits for is done.

Two threads may move a queue: the rank's own, in its calls, and one that is there for progress alone (see `progress`).
Whoever moves works has the queue's turn; the other does not wait for it, but for the rank's own thread when it must
block. So no generator is ever resumed twice at a time, and what the works of a group share (scratch, the order of
their first messages) is used by one thread at a time.

    start      fresh work at the end of the queue; begun now, or by the thread that has the turn, in order of start
    finish     the rank takes the turn, and keeps it while it blocks
    push       the progress thread, if the turn is free: resumes what can go on, gives way as soon as the rank wants it
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from hpctrain.collectives.recorder import Message as Record
from hpctrain.contracts import Array, Request
from hpctrain.errors import TransportError

__all__ = ["Message", "Queue", "QueuedWork"]

# How a rank that shares its core waits for a message: awake for so many seconds, then asleep, for a part of the time
# that it has waited so far (so much later than it came is the message noticed), but for no longer than this.
_AT_ONCE, _LATE, _LONGEST_SLEEP = 100e-6, 1 / 16, 500e-6


class Message:
    """One message of `Group.start_send` or `start_recv`; fulfils `contracts.Work`. Local calls only.

    Messages between two ranks are no collectives: each is waited for alone, in any order. Meanwhile the works of
    `queue` move on, since the other rank may wait for one of them before it comes to the message.
    """

    def __init__(self, queue: Queue, request: Request, result: Array, at_end: Callable[[], None] | None,
                 record: Record | None) -> None:
        self._queue, self._request, self._result, self._at_end = queue, request, result, at_end
        self._record, self._finished = record, False

    def done(self) -> bool:
        """Whether the message has arrived, or may be overwritten if it was sent. Never blocks."""
        if not self._finished and self._request.done():
            self._finish()
        return self._finished

    def wait(self) -> Array:
        """Blocks until done; gives the array."""
        if not self._finished:
            if self._record is not None:
                self._record.waiting()
            if self._queue.shares_core:
                self._sleep_until_done()
            while self._queue.busy and not self._request.done():
                self._queue.advance()
                time.sleep(0)  # lets go of the core, which the other rank may need
            self._request.wait()
            self._finish()
        return self._result

    def _sleep_until_done(self) -> None:
        """Looks now and then: a library that waits by asking all the time takes the core from those who compute."""
        start = time.perf_counter()
        while not self._request.done():
            self._queue.advance()
            waited = time.perf_counter() - start
            time.sleep(0 if waited < _AT_ONCE else min(_LATE * waited, _LONGEST_SLEEP))

    def _finish(self) -> None:
        self._finished = True
        if self._at_end is not None:
            self._at_end()
        if self._record is not None:
            self._record.finished()


class QueuedWork:
    """One collective under way; fulfils `contracts.Work`. Local calls only.

    The arrays of the collective belong to it until it is done. Where it fails, whichever thread it was on, each call of
    `done` or `wait` raises its error.

    Attributes:
        finished: it is over, well or with an error. Set last, so whoever sees it sees the result.
        error: why it failed.
    """

    def __init__(self, queue: Queue, steps: Generator[Request, None, None], result: Array,
                 at_end: Callable[[], None] | None, before_wait: Callable[[], None] | None) -> None:
        self._queue, self._steps, self._result = queue, steps, result
        self._at_end, self.before_wait = at_end, before_wait
        self._request: Request | None = None
        self.finished = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether the result is there. Never blocks; moves the work on as far as its messages allow."""
        if not self.finished:
            self._queue.poll(self)
        self._raise()
        return self.finished

    def wait(self) -> Array:
        """Blocks until done, works that were started earlier included; gives what the blocking call returns."""
        if not self.finished:
            self._queue.finish(self)
        self._raise()
        return self._result

    def _raise(self) -> None:
        if self.error is not None:
            self._queue.unseen = None
            raise self.error

    # For the queue, by the thread that has its turn; these raise nothing ---------------------------------------------

    def step(self) -> bool:
        """Goes on to the next request if the one before is done; returns whether it went on. Never blocks."""
        try:
            if self._request is not None and not self._request.done():
                return False
        except Exception as error:  # noqa: BLE001 - the caller of `done` or `wait` gets it
            self.fail(error)
            return True
        self.resume()
        return True

    def resume(self) -> None:
        """Goes on to the next request; the one before must be done."""
        try:
            self._request = next(self._steps, None)
            if self._request is None:
                if self._at_end is not None:
                    self._at_end()
                self.finished = True
        except BaseException as error:  # noqa: BLE001 - as above; whatever it was, the generator cannot go on
            self.fail(error)

    def block(self) -> None:
        """Blocks until this work alone is done."""
        while not self.finished:
            if self._request is not None:
                try:
                    self._request.wait()
                except Exception as error:  # noqa: BLE001 - as above
                    self.fail(error)
                    return
            self.resume()

    def fail(self, error: BaseException) -> None:
        """It is over, with `error`."""
        self.error = error
        self.finished = True


class Queue:
    """The works of one group in the order of their start, which is the same on all ranks.

    All calls but `push` are for the rank's own thread.

    Attributes:
        progress: called with the queue when it has works under way; set by whoever has a progress thread.
        shares_core: whether a rank that waits for a message should let others compute; set by whoever knows the cores.
        unseen: the error of a work that failed on the progress thread, until a call of the rank's has raised it.
    """

    def __init__(self) -> None:
        self._works: deque[QueuedWork] = deque()
        self._fresh: deque[QueuedWork] = deque()  # behind the others, not begun
        self._turn = threading.RLock()
        self._wanted = False  # the rank's own thread waits for its turn
        self.progress: Callable[[Queue], None] | None = None
        self.shares_core = False
        self.unseen: BaseException | None = None

    def start(self, steps: Generator[Request, None, None], result: Any = None,
              at_end: Callable[[], None] | None = None, before_wait: Callable[[], None] | None = None) -> QueuedWork:
        """Starts `steps`. Never blocks.

        `at_end` is called once when they are through, on whichever thread moves them; `before_wait` on the rank's own
        when it has to wait.
        """
        self._raise_unseen()
        work = QueuedWork(self, steps, result, at_end, before_wait)
        self._fresh.append(work)
        if self._turn.acquire(blocking=False):
            try:
                self._begin()
            finally:
                self._turn.release()
        self._raise_unseen()
        if self.progress is not None and not work.finished:
            self.progress(self)
        return work

    @property
    def busy(self) -> bool:
        """Whether some work is not known to be done."""
        return bool(self._works or self._fresh)

    def advance(self) -> None:
        """Moves on every work whose messages allow it. Never blocks."""
        if self.busy:
            self.push()
        self._raise_unseen()

    def push(self) -> bool:
        """As `advance`, for the progress thread: returns whether anything went on, and raises nothing."""
        if not self._take_free_turn():
            return False
        try:
            moved = self._begin()
            for work in self._works:
                while not work.finished and work.step():
                    moved = True
                    if work.error is not None:
                        self._break(work.error)
                        return True
                    if self._wanted:
                        return True
            while self._works and self._works[0].finished:
                self._works.popleft()
            return moved
        finally:
            self._turn.release()

    def poll(self, work: QueuedWork) -> None:
        """Moves on `work` alone. Never blocks."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._begin()
            while not work.finished and work.step():
                pass
            if work.error is not None:
                self._break(work.error)
        finally:
            self._turn.release()

    def finish(self, last: QueuedWork) -> None:
        """Blocks until `last` is over. Earlier works go first: a peer may wait for them."""
        self._take_turn()
        try:
            if not last.finished and last.before_wait is not None:
                last.before_wait()
            self._block(last)
        finally:
            self._turn.release()

    def drain(self) -> None:
        """Blocks until all works are done."""
        if self.busy:
            self._take_turn()
            try:
                self._block(None)
            finally:
                self._turn.release()
        self._raise_unseen()

    def _take_free_turn(self) -> bool:
        return not self._wanted and self._turn.acquire(blocking=False)

    def _take_turn(self) -> None:
        if self._turn.acquire(blocking=False):
            return
        self._wanted = True
        try:
            self._turn.acquire()
        finally:
            self._wanted = False

    # With the turn ---------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begins the works that are not; their first messages go out in the order of their start."""
        begun = False
        while self._fresh:
            work = self._fresh[0]
            self._works.append(work)
            self._fresh.popleft()  # not before: `busy` must not be false in between
            work.resume()
            begun = True
            if work.error is not None:
                self._break(work.error)
        return begun

    def _block(self, last: QueuedWork | None) -> None:
        self._begin()
        while self._works and (last is None or not last.finished):
            work = self._works[0]
            work.block()
            if work.error is not None:
                self._break(work.error)
                return
            self._works.popleft()

    def _break(self, error: BaseException) -> None:
        """A work failed with `error`. Those behind it would wait for ever, since other ranks are out of step."""
        self.unseen = error
        for works in (self._works, self._fresh):
            while works:
                work = works.popleft()
                if not work.finished:
                    text = f"an earlier collective of this group failed: {type(error).__name__}: {error}"
                    behind = TransportError(text)
                    behind.__cause__ = error
                    work.fail(behind)

    def _raise_unseen(self) -> None:
        if self.unseen is not None:
            error, self.unseen = self.unseen, None
            raise error
