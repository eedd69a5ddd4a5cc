"""Works move on while the rank does something else, in order, one thread at a time, and no error of theirs is lost."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain import log
from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.group import SEGMENT_BYTES
from hpctrain.collectives.progress import Progress
from hpctrain.collectives.work import Queue, QueuedWork
from hpctrain.errors import TransportError
from hpctrain.runtime.context import Context
from hpctrain.transport.threads import run_threads
from tests import agreement_cases, algorithm_cases, collective_cases
from tests.collective_cases import cases_of

#: All but the one that counts on a work not being done before it is waited for.
CASES = [case for case in cases_of(agreement_cases, algorithm_cases, collective_cases)
         if case is not algorithm_cases.case_the_observer_is_told]
PATIENCE = 20.0  # seconds; only a failure takes them


@pytest.fixture
def progress() -> Iterator[Progress]:
    made = Progress()
    yield made
    made.close()
    assert made._thread is None or not made._thread.is_alive()


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


@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_collectives_end_while_the_ranks_only_sleep(progress: Progress, num_ranks: int) -> None:
    def run(transport: Any) -> None:
        group = Group(transport, arrays_of, segment_bytes=64)
        group.progress_by(progress)
        halves = group.subgroup([r for r in range(transport.size) if r % 2 == transport.rank % 2])
        data = [np.arange(100.0) + transport.rank, np.full(7, 3), np.ones(1)]
        works = [group.start_all_reduce(data[0]), halves.start_all_reduce(data[1]), group.start_all_reduce(data[2])]
        until(lambda: all(getattr(work, "finished", True) for work in works))
        size = transport.size
        np.testing.assert_array_equal(data[0], np.arange(100.0) * size + sum(range(size)))
        np.testing.assert_array_equal(data[1], np.full(7, 3 * halves.size))
        assert data[2] == size

    run_threads(num_ranks, run, timeout=PATIENCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_else_works_with_the_thread(progress: Progress, case: Callable[[Any], None]) -> None:
    def run(transport: Any) -> None:
        def make(segment_bytes: int = SEGMENT_BYTES, message_limit: int = 0, **options: Any) -> Group:
            group = Group(transport.subgroup(range(3)), arrays_of, segment_bytes=segment_bytes, **options)
            group.progress_by(progress)
            return group

        case(make)

    run_threads(3, run, timeout=PATIENCE)


def test_without_a_thread_nothing_moves_by_itself() -> None:
    def run(transport: Any) -> None:
        group = Group(transport, arrays_of, segment_bytes=64)
        work = group.start_all_reduce(np.arange(100.0))
        time.sleep(0.1)
        assert not work.finished
        work.wait()

    run_threads(2, run, timeout=PATIENCE)


def test_two_groups_may_be_waited_for_in_opposite_orders(progress: Progress) -> None:
    def run(transport: Any) -> None:
        groups = [Group(transport.subgroup(range(2)), arrays_of, segment_bytes=64) for _ in range(2)]
        for group in groups:
            group.progress_by(progress)
        works = [group.start_all_reduce(np.arange(100.0)) for group in groups]
        for work in works if transport.rank else reversed(works):
            work.wait()

    run_threads(2, run, timeout=PATIENCE)


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


def test_many_queues(progress: Progress) -> None:
    gates = [Gate() for _ in range(60)]
    works = [served(progress).start(through(gate, gate)) for gate in gates for _ in range(2)]
    for gate in random.Random(1).sample(gates, len(gates)):
        gate.open.set()
    until(lambda: all(work.finished for work in works))
    assert threading.active_count() < 10


def switches(progress: Progress) -> int:
    """How often the thread has gone to sleep so far."""
    assert progress._thread is not None
    status = Path(f"/proc/self/task/{progress._thread.native_id}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_without_works_it_sleeps_and_with_works_it_looks_seldom(progress: Progress) -> None:
    assert progress._thread is None  # not even made
    queue, gate = served(progress), Gate()
    work = queue.start(through(gate))
    time.sleep(0.05)
    before = switches(progress)
    time.sleep(0.25)
    assert 10 < switches(progress) - before < 300  # 2 ms between two looks
    gate.open.set()
    until(lambda: work.finished)
    time.sleep(0.05)
    before = switches(progress)
    time.sleep(0.2)
    assert switches(progress) - before <= 2


def test_a_queue_goes_with_its_group(progress: Progress) -> None:
    queue, gate = served(progress), Gate()
    reference = weakref.ref(queue)
    work: QueuedWork | None = queue.start(through(gate))
    del queue
    work = None
    time.sleep(0.02)
    gc.collect()
    assert reference() is not None, "its memory may still be written to"
    gate.open.set()

    def gone() -> bool:
        gc.collect()
        return reference() is None

    until(gone)
    assert work is None


def test_after_close_works_move_in_the_ranks_calls() -> None:
    progress = Progress()
    progress.close()  # never begun
    progress = Progress()
    queue, gate = served(progress), Gate()
    work = queue.start(through(gate))
    progress.close()
    progress.close()
    assert progress._thread is not None and not progress._thread.is_alive()
    gate.open.set()
    later = queue.start(through(gate))
    time.sleep(0.02)
    assert not work.finished and not later.finished
    later.wait()
    assert work.finished


EXIT = """
import atexit, time
from hpctrain.collectives.progress import Progress
from hpctrain.collectives.work import Queue

class Never:
    def done(self):
        return False

def steps():
    yield Never()

queue, progress = Queue(), Progress()
# Runs after what is registered later, as MPI's own end does.
atexit.register(lambda: progress._thread.is_alive() and print("the thread is still there"))
queue.progress = progress.serve
work = queue.start(steps())
time.sleep(0.05)
"""


def test_the_process_ends_quietly_with_works_under_way() -> None:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", EXIT], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ACTIONS = st.lists(st.tuples(st.sampled_from(["advance", "done", "wait", "sleep", "barrier"]), st.integers(0, 5)),
                   max_size=8)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 5, 40, 200]), min_size=1, max_size=6), num_ranks=st.integers(1, 3),
       threaded=st.booleans(), actions=st.lists(ACTIONS, min_size=3, max_size=3))
def test_any_interleaving_gives_the_sums(sizes: list[int], num_ranks: int, threaded: bool,
                                         actions: list[list[tuple[str, int]]]) -> None:
    progress = Progress()

    def run(transport: Any) -> None:
        rank, size = transport.rank, transport.size
        group = Group(transport, arrays_of, segment_bytes=64)
        group.progress_by(progress if threaded else None)
        todo = list(actions[rank])
        works, results = [], []
        for number, count in enumerate(sizes):
            array = np.arange(count) * (rank + 1) + number
            works.append(group.start_all_reduce(array, algorithm="ring" if number % 2 else None))
            results.append(array)
            for name, which in [todo.pop() for _ in range(min(len(todo), 2))]:
                if name == "advance":
                    group.advance()
                elif name == "done":
                    works[which % len(works)].done()
                elif name == "wait" and threaded:  # alone, ranks must wait for each other in one order
                    works[which % len(works)].wait()
                elif name == "sleep":
                    time.sleep(0.0005 * which)
        for work in works:
            work.wait()
        total = size * (size + 1) // 2
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, np.arange(len(result)) * total + number * size)

    try:
        run_threads(num_ranks, run, timeout=PATIENCE)
    finally:
        progress.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said about the thread; the ranks of these tests are one process, with one log."""
    lines: list[str] = []
    monkeypatch.setattr(log, "once", lambda text: lines.append(text) if "progress" in text else None)
    return lines


def test_the_setting(said: list[str]) -> None:
    def run(transport: Any) -> None:
        context = Context(transport, None)
        assert context.progress() and context.progress()
        thread = context._progress
        assert context.world._core.queue.progress == thread.serve
        assert not context.progress(False) and context.world._core.queue.progress is None
        assert thread._closed and context._progress is None

    run_threads(2, run, timeout=PATIENCE)
    run_threads(1, lambda transport: Context(transport, None).progress() and pytest.fail("one rank"))
    assert said == []


def test_a_transport_for_one_thread_gets_none_and_a_line_says_so(said: list[str]) -> None:
    def run(transport: Any) -> None:
        transport.concurrent = False
        context = Context(transport, None)
        assert not context.progress(False) and said == []
        context.world.barrier()
        assert not context.progress()
        assert context.world._core.queue.progress is None

    run_threads(2, run, timeout=PATIENCE)
    assert len(said) == 2 and all("no progress thread, since this transport grants less than" in x for x in said)
