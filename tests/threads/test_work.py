"""The works of a queue: in order, one thread at a time, and no error is lost, whichever thread it was on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from hpctrain.collectives.progress import Progress
from hpctrain.collectives.work import Message, Queue
from hpctrain.errors import TransportError
from tests.gates import PATIENCE, Gate, served, through, until


def test_works_begin_in_the_order_of_their_start_and_start_never_waits(progress: Progress) -> None:
    queue, begun = served(progress), []
    at_work, go_on, first, last = threading.Event(), threading.Event(), Gate(), Gate()

    def long_sum() -> Generator[Gate, None, None]:
        yield first
        at_work.set()
        assert go_on.wait(PATIENCE)

    def noting(number: int) -> Generator[Gate, None, None]:
        begun.append((number, threading.get_ident()))
        yield last

    queue.start(long_sum())
    first.open.set()
    assert at_work.wait(PATIENCE)  # the progress thread is inside of a work
    works = [queue.start(noting(number)) for number in range(3)]
    assert not works[0].done()
    queue.advance()
    assert begun == [] and queue.busy
    go_on.set()
    until(lambda: len(begun) == 3)
    assert [number for number, _ in begun] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in begun}
    last.open.set()
    queue.drain()
    assert all(work.finished for work in works) and not queue.busy


def test_what_the_works_of_a_queue_share_is_used_by_one_thread_at_a_time(progress: Progress) -> None:
    queue, inside, clashes, threads = served(progress), [], [], set()

    def careless() -> Generator[Gate, None, None]:
        for _ in range(20):
            if inside:
                clashes.append(1)
            inside.append(1)
            threads.add(threading.get_ident())
            time.sleep(0.0002)
            inside.pop()
            gate = Gate()
            gate.open.set()
            yield gate

    for _ in range(4):
        works = [queue.start(careless()) for _ in range(3)]
        time.sleep(0.005)
        works[1].wait()
        queue.drain()
    assert not clashes and len(threads) == 2


def test_while_the_rank_blocks_in_a_queue_only_that_queue_is_left_alone(progress: Progress) -> None:
    mine, other = served(progress), served(progress)
    held, free = Gate(), Gate()
    blocking = threading.Event()
    waiting = mine.start(through(held), before_wait=blocking.set)
    rank = threading.Thread(target=waiting.wait, daemon=True)
    rank.start()
    assert blocking.wait(PATIENCE)
    until(lambda: rank.ident in held.looked)
    held.looked.clear()
    work = other.start(through(free))
    free.open.set()
    until(lambda: work.finished)
    assert held.looked == set() and not waiting.finished
    held.open.set()
    rank.join(PATIENCE)
    assert waiting.finished


def test_a_work_that_the_rank_is_told_to_wait_for_is_not_ended_by_the_thread(progress: Progress) -> None:
    """Else it would stand in the records as blocked for ever."""
    queue, gate, seen = served(progress), Gate(), []

    def told() -> None:
        gate.open.set()
        time.sleep(0.05)
        seen.append(work.finished)

    work = queue.start(through(gate), before_wait=told)
    time.sleep(0.01)
    work.wait()
    assert seen == [False] and work.finished
    work.wait()
    assert len(seen) == 1


def test_the_thread_gives_way_to_a_rank_that_waits(progress: Progress) -> None:
    queue, rank, threads = served(progress), threading.get_ident(), []

    def long() -> Generator[Gate, None, None]:
        gate = Gate()
        gate.open.set()
        for _ in range(500):
            yield gate
            threads.append(threading.get_ident())
            time.sleep(0.001)

    work = queue.start(long())
    until(lambda: bool(threads))
    work.wait()
    assert threads[0] != rank and threads.count(rank) > 400


def fail_by_request(gate: Gate) -> Generator[Gate, None, None]:
    yield gate
    gone = Gate()
    gone.error = ConnectionError("the peer is gone")
    gone.open.set()
    yield gone


def fail_by_arithmetic(gate: Gate) -> Generator[Gate, None, None]:
    yield gate
    raise ConnectionError("the peer is gone")


def fail_at_once(gate: Gate) -> Generator[Gate, None, None]:
    raise ConnectionError("the peer is gone")
    yield gate


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("failing", [fail_by_request, fail_by_arithmetic])
def test_an_error_is_kept_and_raised_to_the_rank(progress: Progress, failing: Any, threaded: bool) -> None:
    queue = served(progress) if threaded else Queue()
    gate, never = Gate(), Gate()
    before, failed, behind = queue.start(through(gate)), queue.start(failing(gate)), queue.start(through(never))
    gate.open.set()
    if threaded:
        until(lambda: failed.finished and behind.finished)
    before.wait()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the peer is gone"):
            failed.wait()
        with pytest.raises(ConnectionError, match="the peer is gone"):
            failed.done()
        with pytest.raises(TransportError, match="earlier collective .* ConnectionError: the peer is gone") as caught:
            behind.wait()
        assert caught.value.__cause__ is failed.error
    open_gate = Gate()
    open_gate.open.set()
    queue.start(through(open_gate)).wait()  # the error was seen
    assert not queue.busy


def test_an_error_at_the_very_start_is_raised_by_the_start() -> None:
    queue = Queue()
    with pytest.raises(ConnectionError):
        queue.start(fail_at_once(Gate()))
    queue.drain()


def at_end_fails() -> None:
    raise MemoryError("no room for the result")


@pytest.mark.parametrize("notice", ["start", "advance", "drain"])
def test_an_error_of_a_work_that_nobody_waits_for_comes_with_the_next_call(progress: Progress, notice: str) -> None:
    queue, gate = served(progress), Gate()
    work = queue.start(through(gate), at_end=at_end_fails)
    gate.open.set()
    until(lambda: work.finished)
    call = {"start": lambda: queue.start(through(gate)), "advance": queue.advance, "drain": queue.drain}[notice]
    with pytest.raises(MemoryError):
        call()
    queue.drain()  # once is enough


def test_the_thread_outlives_an_error(progress: Progress) -> None:
    for _ in range(3):
        queue, gate = served(progress), Gate()
        gate.open.set()
        work = queue.start(fail_by_request(gate))
        until(lambda work=work: work.finished)
    assert progress._thread is not None and progress._thread.is_alive()


def test_who_sees_a_work_finished_sees_its_result(progress: Progress) -> None:
    queue, gate, result = served(progress), Gate(), []

    def put_back() -> None:
        time.sleep(0.05)
        result.append(1)

    work = queue.start(through(gate), at_end=put_back)
    gate.open.set()
    until(lambda: work.finished)
    assert result == [1]


class _Late:
    """A message that is there after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.looks, self._there = 0, time.perf_counter() + seconds

    def done(self) -> bool:
        self.looks += 1
        return time.perf_counter() >= self._there

    def wait(self) -> None:
        assert self.done(), "would keep the core"


def test_a_rank_that_shares_its_core_sleeps_while_it_waits_for_a_message() -> None:
    queue, late, moved = Queue(), _Late(0.2), []
    queue.shares_core = True

    def other() -> Generator[Any, None, None]:
        yield _Late(0.05)
        moved.append(late.done())

    queue.start(other())
    used = time.thread_time()
    assert Message(queue, late, "array", None, None).wait() == "array"
    assert time.thread_time() - used < 0.1
    assert late.looks < 2000, "asleep for most of the time: awake it would look some hundred thousand times"
    assert moved == [False], "works go on meanwhile"
