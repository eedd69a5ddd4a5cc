"""Every algorithm of every operation is proved right for any number of ranks; wrong names and numbers are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise as pairs

import pytest

from hpctrain.errors import PlanError, UnsupportedError
from hpctrain.plan.algorithms import ALGORITHMS, make_plan
from hpctrain.plan.check import check
from hpctrain.plan.rows import EvenRows, uneven
from hpctrain.plan.split import bounds
from hpctrain.plan.steps import OPERATIONS, CollectivePlan

NAMES = [(operation, algorithm) for operation, makers in ALGORITHMS.items() for algorithm in makers]
ROOTED = ("broadcast", "scatter", "gather", "reduce")
named = pytest.mark.parametrize(("operation", "algorithm"), NAMES, ids=lambda name: name)


def plans(operation: str, algorithm: str, p: int, shape: tuple[int, ...] | int) -> Iterator[CollectivePlan]:
    """The plan with every root and setting that makes a difference."""
    settings: list[dict[str, int]] = [{}]
    if operation in ROOTED:
        settings = [{"root": root} for root in sorted({0, 1 % p, p // 2, p - 1})]
    elif algorithm == "two-level":
        settings = [{"node_size": g} for g in sorted({1, 2, 3, 4, p - 1 or 1, p, p + 1})]
    elif algorithm == "parameter server":
        settings = [{}] + [{"num_servers": k} for k in sorted({1, (p + 1) // 2, p})]
    elif algorithm == "pairwise" and operation != "all_to_all":
        settings = [{}, {"block": 2}]
    for setting in settings:
        yield make_plan(operation, algorithm, p, shape, **setting)


@named
def test_right_for_any_number_of_ranks(operation: str, algorithm: str) -> None:
    for p in range(1, 18):
        sizes = [0, 1, p - 1, p, p + 1, 3 * p + 1]
        for count in sizes + [10**12 + 7] * (algorithm != "pairwise"):
            for plan in plans(operation, algorithm, p, count):
                assert (plan.operation, plan.algorithm, plan.num_ranks) == (operation, algorithm, p)
                check(plan)


@named
def test_right_for_parts_of_any_length(operation: str, algorithm: str) -> None:
    for p in range(1, 8):
        for b in [tuple(min(i * i, 10) for i in range(p + 1)), (*[0] * p, 9), (0, *[9] * p), (0,) * (p + 1)]:
            shape = b
            if operation == "all_to_all":
                lengths = [stop - start for start, stop in pairs(b)]
                shape = uneven([lengths[i:] + lengths[:i] for i in range(p)])
            for plan in plans(operation, algorithm, p, shape):
                check(plan)


def test_every_operation_has_a_naive_algorithm_to_compare_with() -> None:
    assert set(ALGORITHMS) == set(OPERATIONS)
    assert all("naive" in makers for makers in ALGORITHMS.values())


@named
def test_one_rank_sends_nothing(operation: str, algorithm: str) -> None:
    for plan in plans(operation, algorithm, 1, 10):
        assert all(type(action).__name__ == "Finish" for step in plan.program(0) for action in step)


def test_even_rows_are_what_they_stand_for() -> None:
    for p in range(1, 6):
        for length in (0, 1, p, 2 * p + 1):
            row = bounds(length, p)
            listed = uneven([[stop - start for start, stop in pairs(row)]] * p)
            rows = EvenRows(length, p)
            assert tuple(rows) == rows[:] == listed
            assert rows[-1] == length * p
            with pytest.raises(IndexError):
                rows[p * p + 1]


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "text"),
    [
        (("allreduce", "ring", 4, 8), {}, UnsupportedError, "'allreduce' is unknown.*mean 'all_reduce'.*'all_to_all'"),
        (("broadcast", "rings", 4, 8), {}, UnsupportedError, "'rings' is unknown for broadcast.*mean 'ring'.*'naive'"),
        (("all_reduce", "ring", 0, 8), {}, PlanError, "num_ranks = 0"),
        (("gather", "naive", 4, 8), {"root": 4}, PlanError, "root = 4"),
        (("all_reduce", "two-level", 4, 8), {}, PlanError, "needs node_size"),
        (("all_reduce", "two-level", 4, 8), {"node_size": 0}, PlanError, "node_size = 0"),
        (("all_reduce", "parameter server", 4, 8), {"num_servers": 5}, PlanError, r"num_servers = 5 must be in 1\.\.4"),
        (("all_to_all", "naive", 4, (0, 1, 2)), {}, PlanError, r"must have num_ranks\*\*2 \+ 1 = 17"),
    ],
)
def test_wrong_names_and_numbers_are_refused(
    arguments: tuple[str, str, int, int], settings: dict[str, int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_plan(*arguments, **settings)
