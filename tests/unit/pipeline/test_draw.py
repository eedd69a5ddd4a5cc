"""Text pictures and trace files."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.classic import one_f_one_b
from hpctrain.plan.pipeline.draw import draw, grid
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.trace import Span, from_chrome, to_chrome
from hpctrain.plan.pipeline.zero_bubble import zb_h1
from hpctrain.plan.schedule import BackwardInput, Forward, RecvActivation


def test_the_whole_picture():
    assert draw(simulate(one_f_one_b(2, 3))) == (
        "1f1b, 2 ranks, 3 micro-batches: makespan 12, bubble 3 (33.3 % of the ideal time, 25.0 % of the makespan)\n"
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --  stash 2, idle 3\n"
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .   stash 1, idle 0")
    assert "stash 1, held 2, idle 0" in draw(simulate(zb_h1(2, 2)))


def test_columns():
    timeline = simulate(one_f_one_b(2, 1), Times((1.5, 1), (1, 1), (0.5, 0.5)))
    assert grid(timeline.spans) == ["F0 -- -- .  .  .  .  .  B0 -- --", ".  .  .  F0 -- B0 -- -- .  .  . "]
    assert grid(timeline.spans, 10) == ["F0 B0", "F0 B0"]  # every action keeps a column
    uneven = simulate(one_f_one_b(2, 9), Times((1, 1.0001), (1, 1), (0.7, 1)))
    assert len(grid(uneven.spans)[0].split()) <= 260  # an exact column would be a ten-thousandth
    assert grid([[], []]) == ["", ""]
    assert grid([[Span(0, Forward(0), 0, 0)]]) == [""]


def test_trace_of_a_plan_and_a_real_run_side_by_side():
    planned = [span for spans in simulate(one_f_one_b(2, 2)).spans for span in spans]
    real = [Span(0, RecvActivation(1, 1), 0.25, 0.5), Span(1, BackwardInput(1, 3), 0.5, 1.5)]
    text = to_chrome({"planned": planned, "real": real})
    events = json.loads(text)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"planned", "real"}
    last = [e for e in events if e["ph"] == "X"][-1]
    assert (last["name"], last["cat"], last["pid"], last["tid"], last["ts"], last["dur"]) == (
        "3I1", "BackwardInput", 1, 1, 0.5e6, 1e6)
    assert from_chrome(text) == {"planned": tuple(planned), "real": tuple(real)}
    scaled = from_chrome(to_chrome({"planned": planned}, unit=Fraction(1, 2)))["planned"]
    assert scaled[-1].stop == planned[-1].stop / 2


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'])
def test_not_a_trace(text):
    with pytest.raises(PlanError, match="not a trace of a pipeline"):
        from_chrome(text)
