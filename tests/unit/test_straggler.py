"""Who is slow: by how much, in what, and when nobody is."""

from __future__ import annotations

import pytest

from hpctrain.runtime.straggler import find_slow

QUICK = [0.001, 0.004, 0.008, 0.002]


def test_the_slow_rank_and_what_it_is_slow_in():
    slow = [0.001, 0.054, 0.008, 0.002]
    assert find_slow([QUICK, QUICK, slow, QUICK]) == (2, "forward", pytest.approx(65 / 15))
    assert find_slow([slow, QUICK]) == (0, "forward", pytest.approx(65 / 15))


def test_the_part_is_where_the_rank_differs_not_the_longest_part():
    assert find_slow([QUICK, [0.0100, 0.004, 0.0105, 0.002], QUICK])[:2] == (1, "data")


@pytest.mark.parametrize("times", [
    [QUICK], [QUICK] * 4, [QUICK, [1.4 * x for x in QUICK], QUICK],
    [[1e-5] * 4, [1e-4] * 4, [1e-5] * 4],  # ten times as slow, and nobody could notice
    [[0.0] * 4, [0.0] * 4],
])
def test_nobody_is_slow(times):
    assert find_slow(times) is None


def test_half_of_the_ranks_slow_is_the_machine_not_a_rank():
    slow = [2 * x for x in QUICK]
    assert find_slow([slow, slow, slow, QUICK]) is None
