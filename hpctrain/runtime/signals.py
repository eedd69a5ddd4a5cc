"""Signals as a flag: the training loop asks, at a moment that suits it.

Owns the handlers of the signals by which batch systems and people ask a job to stop. A handler only remembers; whether
to save and leave is decided by all ranks together, in the step's reduction. Must not know MPI, engines or files.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hpctrain import log

__all__ = ["SIGNALS", "Signals"]

#: Wall time and preemption (TERM; USR1 and USR2 as sites configure them), and Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Remembers that a signal came. Local; nothing happens before `install`.

    A handler that the user had set is still called, after the flag is set. The second Ctrl-C acts at once, as Python
    does without us. Only the main thread may install; from others it is a line in the log, not an error.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self._numbers = tuple(numbers)
        self._previous: dict[int, Any] = {}
        self._received: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether one of the signals has come to this rank since `install` or `clear`."""
        return self._received is not None

    @property
    def received(self) -> str | None:
        """The name of the last signal that came ("SIGUSR1"), or None."""
        return None if self._received is None else self._received.name

    def clear(self) -> None:
        """Forgets what came."""
        self._received = None

    def install(self) -> Signals:
        """Sets the handlers; a second call changes nothing. A SIGINT that the shell told us to ignore stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            log.once("signals are not watched: start() or the trainer was not called from the main thread")
            return self
        for number in self._numbers:
            previous = signal.getsignal(number)
            if number in self._previous or (number == signal.SIGINT and previous is signal.SIG_IGN):
                continue
            self._previous[number] = previous
            signal.signal(number, self._handle)
        return self

    def close(self) -> None:
        """Puts the handlers back that were there before, where ours is still in place. Main thread only."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self._received == signal.SIGINT
        self._received = signal.Signals(number)
        previous: Callable[[int, FrameType | None], Any] | Any = self._previous.get(number)
        if again:
            signal.default_int_handler(number, frame)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
