"""Works move on while the rank does something else; the thread sleeps without works, and ends with its process."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
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
from hpctrain.collectives.work import QueuedWork
from hpctrain.runtime.context import Context
from hpctrain.transport.threads import run_threads
from tests import agreement_cases, algorithm_cases, collective_cases
from tests.collective_cases import cases_of
from tests.gates import PATIENCE, Gate, served, through, until

#: All but the one that counts on a work not being done before it is waited for.
CASES = [case for case in cases_of(agreement_cases, algorithm_cases, collective_cases)
         if case is not algorithm_cases.case_the_observer_is_told]


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


def test_many_queues(progress: Progress) -> None:
    gates = [Gate() for _ in range(60)]
    before = threading.active_count()
    works = [served(progress).start(through(gate, gate)) for gate in gates for _ in range(2)]
    for gate in random.Random(1).sample(gates, len(gates)):
        gate.open.set()
    until(lambda: all(work.finished for work in works))
    assert threading.active_count() <= before + 1


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
