"""Requests that are done when a test says so, and queues whose works wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator

from hpctrain.collectives.progress import Progress
from hpctrain.collectives.work import Queue

PATIENCE = 20.0  # seconds; only a failure takes them


class Gate:
    """A request that is done when the test says so; notes which threads asked."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None
        self.looked: set[int] = set()

    def done(self) -> bool:
        self.looked.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return self.open.is_set()

    def wait(self) -> None:
        self.looked.add(threading.get_ident())
        assert self.open.wait(PATIENCE), "the gate was never opened"
        if self.error is not None:
            raise self.error


def through(*gates: Gate) -> Generator[Gate, None, None]:
    yield from gates


def served(progress: Progress) -> Queue:
    queue = Queue()
    queue.progress = progress.serve
    return queue


def until(fact: Callable[[], bool]) -> None:
    """Waits for a fact without moving anything on."""
    end = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)
