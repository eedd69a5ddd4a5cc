"""DualPipe and DualPipeV: slots and idle slots of the published table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan.pipeline.dual import dualpipe, dualpipe_v
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.stash import peaks
from hpctrain.plan.schedule import symbol, to_text


def paired(plan, *times):
    return simulate(plan, replace(Times.even(plan, *times), paired=1))


def test_slots():
    dual, folded = paired(dualpipe(8, 20)), paired(dualpipe_v(4, 10))
    assert (dual.makespan, dual.bubble) == (66, 6)
    assert (folded.makespan, folded.bubble) == (33, 3)
    assert {p.stash for p in peaks(dual.plan)} == {9}  # the table's PP + 1
    assert {p.stash for p in peaks(folded.plan)} == {9}


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("forward, backward, weight", [(1, 1, 1), (2, 3, 2), (2, 3, 3), (4, 5, 1)])
def test_the_bubble_of_the_table(ranks, forward, backward, weight):
    """(PP / 2 - 1)(F&B + B - 3W), where B is the whole backward and F&B = F + B."""
    whole = backward + weight
    bubble = (ranks // 2 - 1) * (forward + whole + whole - 3 * weight)
    assert paired(dualpipe(ranks, 2 * ranks + 2), forward, backward, weight).bubble == bubble


def test_one_after_the_other_is_no_slower():
    for plan in (dualpipe(8, 20), dualpipe_v(4, 10)):
        assert simulate(plan).makespan <= paired(plan).makespan


def test_few_micro_batches_are_a_whole_schedule_with_holes():
    whole = dualpipe_v(3, 6)
    for count in range(1, 6):
        for order, full in zip(dualpipe_v(3, count).orders, whole.orders):
            kept = [symbol(a, stages=True).rstrip("*") for a in full if getattr(a, "micro_batch", 0) < count]
            assert [symbol(a, stages=True).rstrip("*") for a in order] == kept
    alone = [symbol(a, stages=True) for a in dualpipe(4, 1).orders[1]]
    assert alone == ["1F0", "1B0*", "R", "U"]
    assert to_text(dualpipe(2, 2).orders[0], stages=True) == "0F0 3F1 3B1* 0B0* R U"


@given(st.integers(1, 7), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_each_copy_gets_its_half(ranks, micro_batches):
    plan = dualpipe(ranks, micro_batches)
    halves = [plan.micro_batches_of(stage) for stage in (0, ranks)]
    assert [len(half) for half in halves] == [(micro_batches + 1) // 2, micro_batches // 2]
    assert [*halves[0], *halves[1]] == list(range(micro_batches))
    assert plan.stages_of(0) == ((0, 2 * ranks - 1) if ranks > 1 else (0, 1))


def test_who_holds_the_same_stages():
    five = dualpipe(5, 4)
    assert [five.parts_of(rank) for rank in range(5)] == [(0, 4), (1, 3), (2,), (1, 3), (0, 4)]
    assert five.peers() == ((0, 4), (1, 3), (2,), (1, 3), (0, 4))
    assert dualpipe(1, 2).parts_of(0) == (0,)
    folded = dualpipe_v(2, 2)
    assert ([folded.parts_of(rank) for rank in (0, 1)], folded.peers()) == ([(0, 3), (1, 2)], ((0,), (1,)))
    nothing = make_plan("second", 1, (1, 1), [[], [], []])
    assert nothing.peers() == ((0,), (1,), (2,))
