"""A thread that moves collectives on while the rank computes.

Owns this thread and how often it looks. It serves every queue (see `work`) that has works under way and sleeps while
none has. Between two looks it pauses: shortly after something went on, and twice as long after each look in vain, so a
message is noticed late by no more than the time that it took. A look costs some 20 us of a core and of Python's lock;
the longest pause bounds what a computation loses.

    start     |look|..|look|..|look|....|look|........|look|................|look|..|look|   all done: sleeps
                 went on   in vain ......................   2 ms at most       went on

Knows neither groups nor transports. The transport must bear two threads at a time (`Transport.concurrent`).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque

from hpctrain.collectives.work import Queue

__all__ = ["LONGEST", "Progress"]

SHORTEST, LONGEST = 20e-6, 2e-3  # seconds between two looks
_PATIENCE = 10.0  # seconds that the end of a process waits for a step under way, such as a sum in memory


class Progress:
    """One daemon thread, from the first work on until `close` or the end of the interpreter.

    It holds a queue only while works of it are under way: their memory must stay. An error in a work is kept by it and
    raised where the rank asks for it.
    """

    def __init__(self) -> None:
        self._called: deque[Queue] = deque()
        self._bell = threading.Event()
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def serve(self, queue: Queue) -> None:
        """`queue` has works under way. Local, never blocks; any thread."""
        if self._closed:
            return
        self._called.append(queue)
        if not self._bell.is_set():
            self._bell.set()
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """Ends the thread; works that are under way move on in the rank's calls alone. Any number of times."""
        self._closed = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            atexit.unregister(self.close)

    def _start(self) -> None:
        with self._making:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hpctrain progress", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # MPI finalizes after this, and must not meet a thread inside of it

    def _run(self) -> None:
        active: list[Queue] = []
        pause = SHORTEST
        while not self._closed:
            if not active and not self._called:
                self._bell.clear()
                if not self._called and not self._closed:  # what came since then has rung again
                    self._bell.wait()
            elif self._look(active):
                pause = SHORTEST
            else:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)

    def _look(self, active: list[Queue]) -> bool:
        """One look at all queues that are busy; returns whether anything went on or came."""
        moved = bool(self._called)
        while self._called:
            queue = self._called.popleft()
            if queue not in active:
                active.append(queue)
        for queue in active:
            moved |= queue.push()
        active[:] = [queue for queue in active if queue.busy]
        return moved
