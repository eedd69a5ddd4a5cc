"""Shares of a node's cores, as numbers, and when they are applied."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hpctrain.runtime.threads import Threads, allowed_cores, fair_share


@pytest.mark.parametrize("core_sets, expected", [
    ([range(8)], [8]),
    ([range(8)] * 2, [4, 4]),
    ([range(8)] * 3, [2, 2, 2]),
    ([range(2)] * 4, [1, 1, 1, 1]),
    ([[0, 1], [2, 3]], [2, 2]),
    ([[0], [0, 1, 2]], [1, 2]),
    ([range(30)] * 10, [3] * 10),  # thirty tenths are three, not 2.9999
    ([[], [0]], [1, 1]),
])
def test_fair_share(core_sets, expected):
    assert [fair_share(core_sets, rank) for rank in range(len(core_sets))] == expected


class Library:
    """An array library that remembers the count."""

    def __init__(self, name):
        self.name, self.counts = name, []

    def set_num_threads(self, count):
        self.counts.append(count)


def test_applied_once_when_a_library_is_first_seen():
    library, other = Library("a"), Library("b")
    threads = Threads(3, allowed_cores())
    arrays_of = threads.watching(lambda array: array.home)
    for home in (library, library, other, library):
        assert arrays_of(SimpleNamespace(home=home)) is home
    assert library.counts == [3] and other.counts == [3]


def test_the_user_wins():
    library = Library("a")
    Threads(3, allowed_cores(), "OMP_NUM_THREADS").apply(library)
    assert library.counts == []


def test_cores_come_back(capfd):
    before = allowed_cores()
    if len(before) < 2:
        pytest.skip("needs two cores")
    try:
        threads = Threads(1, before)
        os.sched_setaffinity(0, {min(before)})
        threads.apply(Library("narrower"))
        assert allowed_cores() == before
        assert f"narrower cut this process's cores from {len(before)} to 1" in capfd.readouterr().err
    finally:
        os.sched_setaffinity(0, before)
