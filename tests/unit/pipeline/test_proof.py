"""The proof accepts any schedule that can be run, and names the place in one that cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.classic import gpipe, one_f_one_b
from hpctrain.plan.pipeline.plan import plan_of
from hpctrain.plan.pipeline.proof import buffers_needed, prove
from hpctrain.plan.pipeline.simulate import simulate
from hpctrain.plan.pipeline.text import from_text
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward, SendActivation
from tests.pipeline_cases import runnable

HEAD = "schedule mine\nstages {}\nmicro-batches {}\n"


def text(stages, micro_batches, *rows):
    return HEAD.format(stages, micro_batches) + "\n".join(f"rank {r}: {row}" for r, row in enumerate(rows))


@pytest.mark.parametrize("source, complaint", [
    (text("0", 2, "F0 B0 F1"), "mine: rank 0, stage 0: 0B1 is missing"),
    (text("0", 2, "F0 B0"), "mine: rank 0, stage 0: 0F1 is missing"),
    (text("0", 1, "F0 I0"), "mine: rank 0, stage 0: 0W0 is missing"),
    (text("0", 1, "F0 F0 B0"), "mine: rank 0, slot 1, 0F0: stage 0 has done this for micro-batch 0 before"),
    (text("0", 1, "F0 B0 B0"), r"mine: rank 0, slot 2, 0B0\*: stage 0 has done this"),
    (text("0", 1, "F0 I0 W0 B0"), r"mine: rank 0, slot 3, 0B0\*: stage 0 has done this"),
    (text("0", 1, "F0 I0 I0 W0"), r"mine: rank 0, slot 2, 0I0: stage 0 has done this"),
    (text("0", 1, "F0 I0 W0 W0"), r"mine: rank 0, slot 3, 0W0\*: stage 0 has done this"),
    (text("0", 1, "B0 F0"), r"mine: rank 0, slot 0, 0B0\*: stage 0 has not run 0F0 yet"),
    (text("0", 1, "F0 W0 I0"), r"mine: rank 0, slot 1, 0W0\*: stage 0 has not run 0I0 yet"),
    (text("0", 1, "F0 W0 B0"), r"mine: rank 0, slot 1, 0W0: stage 0 has not run 0I0 yet"),
    (text("0", 1, "F0 B0 F1 B1"), "mine: rank 0, slot 2, 0F1: micro-batches 0..0 pass stage 0, not 1"),
    (text("0 1", 1, "0F0 1F0 0B0", "F0 B0"), r"mine: rank 0, slot 1, 1F0: the rank holds stages \[0\], not stage 1"),
    (text("0", 1, "F0 9F0 B0"), r"mine: rank 0, slot 1, 9F0: the rank holds stages \[0\], not stage 9"),
    (text("0", 1, "F0 SA0 B0"), "mine: rank 0, slot 1, 0SA0: sends and receives are derived"),
    (text("0", 1, "F0 B0 U"), r"mine: rank 0, slot 2, U: an update \(U\) follows the reduction \(R\)"),
    (text("0", 2, "F0 B0* F1 B1* R U"), r"mine: rank 0, slot 1, 0B0\*: the star marks .* so this must be 0B0"),
    (text("0", 2, "F0 B0 R U F1 B1"), r"mine: rank 0: the order must end with an update"),
    (text("0 1", 2, "F0 B0 F1 B1", "F1 B1 F0 B0"),
     "mine: nobody can go on: rank 0, slot 1, waits in 0RG1; rank 1, slot 0, waits in 1RA1"),
    (text("0 0", 1, "1F0 0F0 1B0 0B0"), "mine: nobody can go on: rank 0, slot 0, waits in 1F0"),
    (text("0 0", 1, "0F0 1F0 0B0 1B0"), r"mine: nobody can go on: rank 0, slot 2, waits in 0B0\*"),
    (text("0", 1, "F0 R U B0 R U"), "mine: rank 0, stage 0, slot 0, 0F0: weights = 'one', but an update comes"),
    (text("0", 1, "F0 I0 R U W0 R U"), "mine: rank 0, stage 0, slot 0, 0F0: weights = 'one', but an update comes"),
])
def test_complaints(source, complaint):
    with pytest.raises(PlanError, match="^" + complaint):
        prove(from_text(source))


def test_a_rank_of_the_pipeline_that_never_runs_its_stage():
    whole = one_f_one_b(2, 2)
    with pytest.raises(PlanError, match="rank 1, stage 1: 1F0 is missing"):
        prove(replace(whole, orders=(whole.orders[0], whole.orders[1][-2:])))
    with pytest.raises(PlanError, match="sends and receives are derived"):
        prove(replace(whole, orders=(whole.orders[0], (SendActivation(0, 1), *whole.orders[1]))))


def test_bounded_channels():
    plan = gpipe(2, 5, chunks=3)  # rank 1 is done with a chunk before rank 0 takes the first of its results
    assert buffers_needed(plan) == prove(plan).buffers == 2
    prove(plan, buffers=2)
    with pytest.raises(PlanError, match=r"with 1 message a channel nobody can go on: rank 0, slot \d+, .* 2 would"):
        prove(plan, buffers=1)


def test_ranks_may_own_nothing():
    plan = from_text(text("1", 2, "", "F0 F1 B1 B0"))
    proof = prove(plan)
    assert (proof.messages, [p.stash for p in proof.ranks]) == (0, [0, 2])
    assert simulate(plan).makespan > 0


def test_a_users_function():
    def backwards_reversed(rank, num_ranks, num_micro_batches):
        yield from (Forward(i, rank) for i in range(num_micro_batches))
        yield from (Backward(i, stage=rank) for i in reversed(range(num_micro_batches)))

    plan = plan_of(backwards_reversed, 3, 4)
    assert (plan.name, prove(plan).messages, simulate(plan).makespan) == ("backwards_reversed", 16, 18)


@given(runnable())
@settings(max_examples=150, deadline=None)
def test_whatever_can_be_run_is_proved(plan):
    proof = prove(plan)
    assert 1 <= proof.buffers <= plan.num_micro_batches
    prove(plan, proof.buffers)
    assert simulate(plan).makespan >= simulate(plan).ideal


@given(runnable(), st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_lacks_or_doubles_something_is_not(plan, data):
    rank = data.draw(st.sampled_from([r for r in range(plan.num_ranks) if plan.stages_of(r)]))
    order = list(plan.orders[rank])
    slot = data.draw(st.integers(0, len(order) - 1))
    if data.draw(st.booleans()):
        del order[slot]
    elif isinstance(order[slot], Forward | Backward | BackwardInput | BackwardWeight):
        order.insert(slot, order[slot])
    else:
        order = order[:slot] + order[slot + 1:]
    with pytest.raises(PlanError, match="random: rank"):
        prove(replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1:])))
