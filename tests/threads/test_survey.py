"""The survey on threads: every contender of every operation is right, a wrong one does not get timed."""

from __future__ import annotations

import time

import pytest

from hpctrain.arrays import arrays_of
from hpctrain.bench import contenders
from hpctrain.bench.contenders import OPERATIONS, Case
from hpctrain.bench.measure import alternate
from hpctrain.bench.survey import CHOSEN, Request, survey
from hpctrain.collectives import Group
from hpctrain.collectives.choose import Chooser, ways
from hpctrain.dtypes import dtype_of
from hpctrain.plan.algorithms import ALGORITHMS
from hpctrain.transport.threads import run_threads


def on_ranks(num_ranks, function):
    return run_threads(num_ranks, lambda transport: function(Group(transport, arrays_of, chooser=Chooser())))


@pytest.mark.parametrize("num_ranks, dtype", [(1, "float32"), (3, "float32"), (4, "bfloat16"), (3, "int8"),
                                              (2, "complex64")])  # fmt: skip
def test_every_contender_is_right_and_is_timed(num_ranks, dtype):
    request = Request(tuple(OPERATIONS), (dtype,), (1, 1000), rounds=2)
    for ranks in on_ranks(num_ranks, lambda group: list(survey(group, request))):
        assert [one.operation for one in ranks] == [name for name in OPERATIONS for _ in range(2)]
        for one in ranks:
            offered = ways(one.operation) if one.operation in ALGORITHMS else []
            assert set(one.times) == {CHOSEN, *offered} - set(one.refused)
            assert not set(one.refused) & {CHOSEN, *ALGORITHMS.get(one.operation, ())}
            assert all(len(times) == 2 and min(times) > 0 for times in one.times.values())
            assert one.native is None and len(one.copy) == 2
        row = dtype_of(dtype).num_bytes * num_ranks  # sizes are rounded up to whole elements a rank
        assert {one.num_bytes for one in ranks} == {row, -(-1000 // row) * row}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_that_does_nothing_is_found_out(operation):
    def check(group):
        case = Case(group, operation, "float32", 240)
        case.check(case.ours())  # its result must not pass for that of the next call
        lazy = {"all_to_all": case.other, "send_recv": case.other, "reduce_scatter": case.part,
                "scatter": case.part}.get(operation, case.whole)
        if group.rank == {"gather": 1, "reduce": 1, "broadcast": 0}.get(operation):
            return True  # has nothing to show, or had it before
        try:
            case.check(lambda: lazy)
        except ArithmeticError as error:
            return f"rank {group.rank} has a wrong result" in str(error)
        return False

    assert all(on_ranks(2, check))


@pytest.mark.parametrize("ordinary", [False, True])
def test_buffers_are_what_they_are_called(ordinary):
    def run(group):
        asked = []
        allocate = group.transport.allocate
        group.transport.allocate = lambda num_bytes: asked.append(num_bytes) or allocate(num_bytes)
        case = Case(group, "all_reduce", "float32", 240, ordinary=ordinary)
        case.check(case.ours())
        return asked

    assert on_ranks(2, run) == [[] if ordinary else [240, 240, 120]] * 2


def test_a_wrong_contender_stops_the_survey_on_all_ranks(monkeypatch):
    wrong = contenders._Operation(lambda case, algorithm: lambda: case.whole, lambda case, native: None,
                                  OPERATIONS["all_reduce"].expected)
    monkeypatch.setitem(OPERATIONS, "all_reduce", wrong)

    def run(group):
        with pytest.raises(RuntimeError, match="all_reduce of float32 by chosen: .*wrong result"):
            list(survey(group, Request(("all_reduce",), ("float32",), (64,), rounds=1)))
        return True

    assert on_ranks(2, run) == [True, True]


def test_ranks_take_contenders_in_the_same_changing_order():
    def run(group):
        order = []
        calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
        times = alternate(group, calls, 20)
        assert all(len(times[name]) == 20 for name in "abc")
        rounds = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
        return rounds, times

    (first, times), (second, same_times) = on_ranks(2, run)
    assert set(first) == {"a", "b", "c"} and times == same_times, "the slowest rank counts, for all"
    assert first == second
    assert first != list("abc") * (len(first) // 3)


def test_the_slowest_rank_counts():
    def run(group):
        return alternate(group, {"late": lambda: time.sleep(0.02 * group.rank)}, 3)["late"]

    assert all(min(seconds) >= 0.02 for seconds in on_ranks(2, run))


def test_what_is_refused_is_said_and_not_timed():
    def run(group):
        return list(survey(group, Request(("all_reduce", "broadcast"), ("bool",), (64,), ("chosen", "ring"), 1)))

    for summed, moved in on_ranks(2, run):
        assert not summed.times and set(summed.refused) == {"chosen", "ring"}
        assert "'bool'" in summed.refused["ring"]
        assert set(moved.times) == {"chosen", "ring"} and not moved.refused


def test_nodes_are_counted_as_the_group_counts_them():
    assert on_ranks(3, lambda group: group.num_nodes()) == [1, 1, 1]
