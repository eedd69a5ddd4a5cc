"""Collectives over MPI move on while the ranks are not in MPI, and two threads of a rank may be in it at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.group import SEGMENT_BYTES
from hpctrain.collectives.progress import Progress
from hpctrain.transport.mpi import MESSAGE_LIMIT, MpiTransport
from tests import algorithm_cases, collective_cases
from tests.collective_cases import cases_of

SIZE = MPI.COMM_WORLD.size
PATIENCE = 30.0  # seconds; only a failure takes them
COUNT = 1 << 20  # 4 MiB of float32: no MPI sends that before the other side asks for it
#: All but the one that counts on a work not being done before it is waited for.
CASES = [case for case in cases_of(algorithm_cases, collective_cases)
         if case is not algorithm_cases.case_the_observer_is_told]

several = pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to wait for")


@pytest.fixture
def progress() -> Iterator[Progress]:
    made = Progress()
    yield made
    made.close()
    assert made._thread is None or not made._thread.is_alive()


def until(fact: Callable[[], bool]) -> None:
    """Waits for a fact without moving anything on."""
    end = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def make() -> Group:
    return Group(MpiTransport(), arrays_of)


def test_the_library_bears_two_threads() -> None:
    transport = MpiTransport()
    assert transport.concurrent  # all that are tested do
    transport.close()


@pytest.mark.parametrize("on_shared_memory", [False, True])
def test_a_reduction_ends_while_all_ranks_sleep(progress: Progress, on_shared_memory: bool) -> None:
    group = make()
    group.progress_by(progress)
    memory = group.transport.allocate(4 * COUNT) if on_shared_memory else memoryview(bytearray(4 * COUNT))
    array = np.frombuffer(memory, "f")
    array[:] = np.arange(COUNT) % 1000 + group.rank
    work = group.start_all_reduce(array)
    until(lambda: getattr(work, "finished", True))
    np.testing.assert_array_equal(array, np.arange(COUNT) % 1000 * SIZE + SIZE * (SIZE - 1) / 2)
    group.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_else_works_with_the_thread(progress: Progress, case: Callable[[Any], None]) -> None:
    made = []

    def group(segment_bytes: int = SEGMENT_BYTES, message_limit: int = MESSAGE_LIMIT, **options: Any) -> Group:
        transport = MpiTransport(message_limit=message_limit)
        made.append(Group(transport, arrays_of, segment_bytes=segment_bytes, **options))
        made[-1].progress_by(progress)
        return made[-1]

    case(group)
    for used in made:
        used.close()


@several
def test_without_the_thread_it_does_not() -> None:
    group = make()
    work = group.start_all_reduce(np.ones(COUNT, "f"))
    time.sleep(0.2)
    assert not work.finished
    work.wait()
    group.close()


@several
def test_one_thread_blocks_in_mpi_while_the_other_moves_another_group(progress: Progress) -> None:
    first, second = make(), make()
    first.progress_by(progress)
    array, word = np.ones(COUNT, "f"), np.zeros(1)
    work = first.start_all_reduce(array)
    if first.rank == 0:
        for peer in range(1, SIZE):
            second.recv(word, peer)  # comes only when the reduction is done there, which needs this rank
            assert word[0] == peer
    else:
        until(lambda: work.finished)
        second.send(np.full(1, float(first.rank)), 0)
    np.testing.assert_array_equal(work.wait(), np.full(COUNT, SIZE))
    first.close()
    second.close()


@several
def test_two_groups_may_be_waited_for_in_opposite_orders(progress: Progress) -> None:
    groups = [make(), make()]
    for group in groups:
        group.progress_by(progress)
    works = [group.start_all_reduce(np.ones(COUNT, "f")) for group in groups]
    for work in works if groups[0].rank else reversed(works):
        assert work.wait()[-1] == SIZE
    for group in groups:
        group.close()


def test_many_works_of_some_groups_while_the_rank_uses_them_too(progress: Progress) -> None:
    world = make()
    world.progress_by(progress)
    halves = world.subgroup([r for r in range(SIZE) if r % 2 == world.rank % 2])
    assert halves is not None
    draw = np.random.default_rng(3)  # the same numbers on all ranks
    for _ in range(15):
        sizes = draw.integers(1, 60_000, 4)
        started = [(group, n, group.start_all_reduce(np.full(n, 1.0 + world.rank)))
                   for n, group in zip(sizes, [world, halves, world, halves], strict=True)]
        time.sleep(float(np.random.default_rng().uniform(0, 0.003)))
        total = world.all_reduce(np.ones(3))
        assert list(total) == [SIZE] * 3
        for group, n, work in started:
            ranks = range(SIZE) if group is world else range(world.rank % 2, SIZE, 2)
            np.testing.assert_array_equal(work.wait(), np.full(n, float(sum(r + 1 for r in ranks))))
    halves.close()
    world.close()
