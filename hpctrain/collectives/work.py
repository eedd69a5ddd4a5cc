"""Asynchronous collectives: what is under way, and in which order it may be waited for.

Owns the queue of works of one group. A work is a generator of requests (see `executor`); the queue resumes it when the
request it waits for is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from hpctrain.collectives.recorder import Message as Record
from hpctrain.contracts import Array, Request

__all__ = ["Message", "Queue", "QueuedWork"]


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
            while self._queue.busy and not self._request.done():
                self._queue.advance()
                time.sleep(0)  # lets go of the core, which the other rank may need
            self._request.wait()
            self._finish()
        return self._result

    def _finish(self) -> None:
        self._finished = True
        if self._at_end is not None:
            self._at_end()
        if self._record is not None:
            self._record.finished()


class QueuedWork:
    """One collective under way; fulfils `contracts.Work`. Local calls only.

    The arrays of the collective belong to it until it is done.
    """

    def __init__(self, queue: Queue, steps: Generator[Request, None, None], result: Array,
                 at_end: Callable[[], None] | None, before_wait: Callable[[], None] | None) -> None:
        self._queue, self._steps, self._result = queue, steps, result
        self._at_end, self._before_wait = at_end, before_wait
        self._request: Request | None = None
        self.finished = False
        self.resume()

    def done(self) -> bool:
        """Whether the result is there. Never blocks; moves the work on as far as its messages allow."""
        while not self.finished:
            if self._request is not None and not self._request.done():
                return False
            self.resume()
        return True

    def wait(self) -> Array:
        """Blocks until done, works that were started earlier included; gives what the blocking call returns."""
        if not self.finished:
            if self._before_wait is not None:
                self._before_wait()
            self._queue.finish(self)
        return self._result

    def resume(self) -> None:
        """Goes on to the next request; the one before must be done."""
        self._request = next(self._steps, None)
        if self._request is None:
            self.finished = True
            if self._at_end is not None:
                self._at_end()

    def block(self) -> None:
        """Blocks until this work alone is done."""
        while not self.finished:
            if self._request is not None:
                self._request.wait()
            self.resume()


class Queue:
    """The works of one group in the order of their start, which is the same on all ranks."""

    def __init__(self) -> None:
        self._works: deque[QueuedWork] = deque()

    def start(self, steps: Generator[Request, None, None], result: Any = None,
              at_end: Callable[[], None] | None = None, before_wait: Callable[[], None] | None = None) -> QueuedWork:
        """Starts `steps`. `at_end` is called once when they are through, `before_wait` when someone has to wait."""
        while self._works and self._works[0].finished:
            self._works.popleft()
        work = QueuedWork(self, steps, result, at_end, before_wait)
        self._works.append(work)
        return work

    @property
    def busy(self) -> bool:
        """Whether some work is not known to be done."""
        return bool(self._works)

    def advance(self) -> None:
        """Moves on every work whose messages allow it. Never blocks."""
        for work in self._works:
            work.done()
        while self._works and self._works[0].done():
            self._works.popleft()

    def finish(self, last: QueuedWork) -> None:
        """Blocks until `last` is done. Earlier works go first: a peer may wait for them, and only we can move them."""
        while self._works:
            work = self._works.popleft()
            work.block()
            if work is last:
                return

    def drain(self) -> None:
        """Blocks until all works are done."""
        while self._works:
            self._works.popleft().block()
