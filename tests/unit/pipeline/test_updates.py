"""The updates of a plan: what they are made of, and which weights must outlive them."""

from __future__ import annotations

from dataclasses import replace

import pipeline_cases
import pytest
from hypothesis import given, settings

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.stale import pipedream, pipedream_2bw
from hpctrain.plan.pipeline.updates import is_stale, updates
from hpctrain.plan.pipeline.versions import versions
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep, ReduceGrads

UPDATE = [ReduceGrads(), OptimizerStep()]


def test_the_table():
    plan = pipedream(3, 5)
    found = updates(plan, versions(plan))
    assert found.groups == ((0,), (1,), (2,), (3,), (4,))
    assert [[sorted(v) for v in needed] for needed in found.needed] == [
        [[0], [0, 1], [1, 2], [2], []], [[0], [1], [2], [3], []], [[], [], [], [], []]]
    assert found.kept == (3, 2, 1)


def test_the_last_update_may_be_smaller():
    plan = pipedream_2bw(2, 5, 2)
    assert updates(plan, versions(plan)).groups == ((0, 1), (2, 3), (4,))


@given(plan=pipeline_cases.plans())
@settings(max_examples=100, deadline=None)
def test_a_stage_alone_keeps_what_its_rank_keeps(plan):
    if plan.copies > 1:
        return
    known = versions(plan)
    found = updates(plan, known)
    assert sorted(i for group in found.groups for i in group) == list(range(plan.num_micro_batches))
    assert is_stale(plan) == plan.name.startswith("pipedream")
    for rank in range(plan.num_ranks):
        assert found.kept[rank] == max(known.kept[stage] for stage in plan.stages_of(rank))


def two(first, second, weights="stash"):
    orders = [[replace(a, stage=s) if hasattr(a, "stage") else a for a in order]
              for s, order in enumerate((first, second))]
    return make_plan("two", 2, [0, 1], orders, weights=weights)


def test_several_stages_of_a_rank_count_together():
    """Stage 0 still needs version 0, stage 1 version 1, and 2 is the newest."""
    order = [Forward(0, 0), Forward(0, 1), BackwardInput(0, 1), BackwardInput(0, 0), BackwardWeight(0, stage=1),
             Forward(1, 0), *UPDATE, Forward(1, 1), BackwardInput(1, 1), BackwardWeight(1, stage=1), *UPDATE,
             BackwardWeight(0, stage=0), Backward(1, stage=0), *UPDATE]
    plan = make_plan("one", 2, [0, 0], [order], weights="stash")
    with pytest.raises(PlanError, match="micro-batch 0 is part of update 3 in stage 0, of update 1 in stage 1"):
        updates(plan, versions(plan))
    order = [Forward(0, 0), Forward(1, 0), Forward(0, 1), Backward(0, stage=1), Backward(0, stage=0), *UPDATE,
             Forward(1, 1), Backward(1, stage=1), Backward(1, stage=0), *UPDATE]
    plan = make_plan("one", 2, [0, 0], [order], weights="stash")
    known = versions(plan)
    found = updates(plan, known)
    assert (known.kept, found.kept, found.needed) == ((2, 1), (2,), ((frozenset({0}), frozenset()),))


def test_a_backward_in_two_parts_needs_its_weights_to_the_end():
    order = [Forward(0), Forward(1), BackwardInput(0), BackwardWeight(0), BackwardInput(1), *UPDATE, BackwardWeight(1),
             *UPDATE]
    plan = make_plan("split", 2, [0], [order], weights="stash")
    assert updates(plan, versions(plan)).needed == ((frozenset({0}), frozenset()),)


def test_refused():
    each = [Forward(0), Backward(0), *UPDATE, Forward(1), Backward(1), *UPDATE]
    once = [Forward(0), Forward(1), Backward(0), Backward(1), *UPDATE]
    twice = [Forward(0), Forward(1), Backward(0), Backward(1), *UPDATE, *UPDATE]
    late = [Forward(0), Forward(1), *UPDATE, Backward(0), Backward(1), *UPDATE]
    for plan, text in ((two(each, once), "micro-batch 1 is part of update 2 in stage 0, of update 1 in stage 1"),
                       (two(once, twice), "rank 1 with stage 1 has 2 updates, but gradients for 1"),
                       (two(late, late), "update 1 of 2 has no micro-batch")):
        with pytest.raises(PlanError, match=text):
            updates(plan, versions(plan))
    assert is_stale(two(each, each, "one")) and not is_stale(schedule("1f1b", 2, 4))
