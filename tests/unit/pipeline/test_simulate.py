"""Times, messages and pairs, by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan.pipeline.classic import gpipe, interleaved, one_f_one_b
from hpctrain.plan.pipeline.dual import dualpipe_v
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.text import from_text
from hpctrain.plan.pipeline.trace import Span
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward


def test_messages_take_time():
    times = Times((1, 1), (1, 1), (1, 1), message=2)
    assert simulate(one_f_one_b(2, 1), times).makespan == 1 + 2 + 3 + 2 + 2
    assert simulate(one_f_one_b(1, 1), Times((1,), (1,), (1,), message=2)).makespan == 3  # nobody to send to


def test_measured_times():
    timeline = simulate(gpipe(2, 3), Times((1, 4), (2, 3), (0, 1)))
    assert [(s.start, s.stop) for s in timeline.spans[1]] == [(1, 5), (5, 9), (9, 13), (13, 17), (17, 21), (21, 25)]
    assert [(s.start, s.stop) for s in timeline.spans[0]][3:] == [(17, 19), (21, 23), (25, 27)]
    assert (timeline.makespan, timeline.ideal, timeline.bubble, timeline.idle(0)) == (27, 24, 3, 18)


def test_chunks_share_the_time_of_a_rank_exactly():
    plan = interleaved(3, 3, 3)
    assert Times.even(plan).forward == (Fraction(1, 3),) * 9
    assert simulate(plan).ideal == 9
    assert Times.even(plan, 0.5).forward == pytest.approx((0.5 / 3,) * 9)


def test_a_pair_begins_and_ends_together():
    plan = from_text("schedule pairs\nstages 0\nmicro-batches 2\nrank 0: F0 F1 B0 B1")
    assert simulate(plan, Times((2,), (1,), (1,), paired=1)).makespan == 8
    timeline = simulate(plan, Times((2,), (1,), (1,), paired=Fraction(3, 4)))
    assert [(s.start, s.stop) for s in timeline.spans[0]] == [(0, 2), (2, Fraction(7, 2)), (Fraction(7, 2), 5), (5, 7)]
    own = one_f_one_b(1, 1)  # a backward cannot run together with the forward that it needs
    assert simulate(own, Times((2,), (1,), (1,), paired=Fraction(1, 2))).makespan == 4


def test_a_whole_backward_may_be_cheaper_than_its_parts():
    plan = from_text("schedule both\nstages 0\nmicro-batches 2\nrank 0: F0 F1 I0 B1 W0")
    assert simulate(plan, Times((2,), (3,), (4,), backward=(5,))).makespan == 2 + 2 + 3 + 5 + 4
    assert simulate(plan, Times((2,), (3,), (4,))).makespan == 2 + 2 + 3 + 7 + 4


def test_the_times_of_a_run_give_the_run_again():
    """A schedule that has backwards in one part and in two: each kind has its own times."""
    times = Times((3, 1, 2, 4), (2, 3, 2, 1), (1, 2, 4, 3), message=1, backward=(2, 4, 5, 3))
    timeline = simulate(dualpipe_v(2, 5), times)
    measured = Times.measured((span for spans in timeline.spans for span in spans), 4)
    for kind, stage in {(type(span.action), span.action.stage) for spans in timeline.spans for span in spans}:
        assert measured.of(kind(0, stage=stage)) == times.of(kind(0, stage=stage))
    assert simulate(timeline.plan, replace(measured, message=1)).makespan == timeline.makespan


def test_what_did_not_run_has_the_time_of_what_did():
    spans = [Span(0, Forward(0, 0), 0, 2), Span(0, Forward(1, 0), 2, 6), Span(0, Backward(0, stage=0), 6, 11),
             Span(0, BackwardInput(1, 1), 11, 12), Span(0, BackwardWeight(1, stage=1), 12, 15)]
    assert Times.measured(spans, 3) == Times([3, 0, 0], [5, 1, 0], [0, 3, 0], backward=[5, 4, 0])


def test_frozen_stages_take_no_time_back():
    timeline = simulate(one_f_one_b(2, 2), Times((1, 1), (0, 1), (0, 1)))
    assert (timeline.busy(0), timeline.busy(1)) == (2, 6)


def test_refused():
    with pytest.raises(ConfigError, match="times for 1 stages, but 1f1b has 2"):
        simulate(one_f_one_b(2, 1), Times((1,), (1,), (1,)))
    for rows in (((1,), (1, 2), (1,)), ((-1,), (1,), (1,))):
        with pytest.raises(ConfigError, match="one time of at least 0 for each stage"):
            Times(*rows)
    with pytest.raises(ConfigError, match="one time of at least 0 for each stage"):
        Times((1,), (1,), (1,), backward=(1, 1))
    with pytest.raises(PlanError, match="rank 0, stage 0: 0B0 can never run"):
        simulate(from_text("schedule x\nstages 0 1\nmicro-batches 2\nrank 0: F0 B0 F1 B1\nrank 1: F1 B1 F0 B0"))
