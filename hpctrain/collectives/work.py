"""Asynchronous collectives: what is under way, and in which order it may be waited for.

Owns the queue of works of one group. A work is a generator of requests (see `executor`); the queue resumes it when the
request it waits for is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from hpctrain.contracts import Request

__all__ = ["Queue", "QueuedWork"]


class QueuedWork:
    """One collective under way; fulfils `contracts.Work`. Local calls only.

    The arrays of the collective belong to it until it is done.
    """

    def __init__(self, queue: Queue, steps: Generator[Request, None, None], at_end: Callable[[], None] | None) -> None:
        self._queue, self._steps, self._at_end = queue, steps, at_end
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

    def wait(self) -> None:
        """Blocks until done, works that were started earlier included."""
        if not self.finished:
            self._queue.finish(self)

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

    def start(self, steps: Generator[Request, None, None], at_end: Callable[[], None] | None = None) -> QueuedWork:
        """Starts `steps`; `at_end` is called once when they are through."""
        while self._works and self._works[0].finished:
            self._works.popleft()
        work = QueuedWork(self, steps, at_end)
        self._works.append(work)
        return work

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
