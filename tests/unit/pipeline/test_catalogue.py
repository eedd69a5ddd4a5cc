"""Every schedule of the register at any size: proved, written and read, simulated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.messages import channel, with_messages
from hpctrain.plan.pipeline.proof import prove
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.text import from_text, plan_to_text
from hpctrain.plan.schedule import OptimizerStep, SendActivation, SendGrad
from tests.pipeline_cases import plans


@given(plans())
@settings(max_examples=250, deadline=None)
def test_any_size_is_proved(plan):
    proof = prove(plan)
    orders = with_messages(plan)
    crossings = [(before, s) for s in range(len(plan.places)) if (before := plan.before(s)) is not None
                 and plan.places[before] != plan.places[s]]
    assert proof.messages == sum(2 * len(plan.micro_batches_of(s)) for _, s in crossings)
    sends = [(*channel(a), a.micro_batch) for order in orders for a in order
             if isinstance(a, SendActivation | SendGrad)]
    assert len(set(sends)) == len(sends) == proof.messages
    for order in plan.orders:
        assert sum(isinstance(a, OptimizerStep) for a in order) == 1 or plan.weights != "one"
    assert all(peak.stash <= peak.held for peak in proof.ranks)
    assert sum(p.stash for p in proof.stages) >= sum(p.stash for p in proof.ranks)


@given(plans())
@settings(max_examples=100, deadline=None)
def test_text_round_trip(plan):
    assert from_text(plan_to_text(plan)) == plan


@given(plans(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_simulation_obeys_the_dependencies(plan, data):
    rows = [data.draw(st.tuples(*[st.integers(0, 4)] * 3)) for _ in plan.places]
    times = Times(*zip(*rows), message=data.draw(st.integers(0, 2)))
    timeline = simulate(plan, times)
    ends = {}
    for spans in timeline.spans:
        for one, two in pairwise(spans):
            assert one.stop <= two.start
        for span in spans:
            name = type(span.action).__name__
            kind = {"Backward": "B", "BackwardInput": "B", "Forward": "F"}.get(name, "W")
            ends[kind, span.action.stage, span.action.micro_batch] = span
            assert span.stop - span.start == times.of(span.action)
    for (kind, stage, i), span in ends.items():
        source = plan.before(stage) if kind == "F" else plan.after(stage)
        if kind != "F":
            assert ends["F" if kind == "B" else "B", stage, i].stop <= span.start
        if kind != "W" and source is not None:
            late = times.message if plan.places[source] != plan.places[stage] else 0
            assert ends[kind, source, i].stop + late <= span.start
    assert timeline.makespan >= timeline.ideal >= max(map(sum, rows)) * (plan.num_micro_batches // plan.copies)


def test_refused():
    with pytest.raises(ConfigError, match=r"'1f1c' is unknown \(did you mean '1f1b'\?\)"):
        schedule("1f1c", 2, 2)
    with pytest.raises(ConfigError, match=r"'1f1b' takes no chunks \(given: 2\); .* 'gpipe' or 'interleaved'"):
        schedule("1f1b", 2, 2, chunks=2)
    for name in SCHEDULES:
        for sizes in ((0, 1), (1, 0)):
            with pytest.raises(ConfigError, match="at least 1"):
                schedule(name, *sizes)
