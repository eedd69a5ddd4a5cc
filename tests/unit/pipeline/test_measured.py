"""Times of stages from the spans of a run."""

from __future__ import annotations

import pytest

from hpctrain.plan.pipeline.catalogue import RUNNABLE, schedule
from hpctrain.plan.pipeline.classic import one_f_one_b
from hpctrain.plan.pipeline.measured import stage_times
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.trace import Span
from hpctrain.plan.schedule import Backward, Forward


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_times_of_a_simulated_run_give_the_same_run(name: str) -> None:
    plan = schedule(name, 3, 4)
    count = len(plan.places)
    times = Times([3 + s for s in range(count)], [2 + s for s in range(count)], [1 + s for s in range(count)])
    timeline = simulate(plan, times)
    spans = [span for row in timeline.spans for span in row]
    again = simulate(plan, stage_times(plan, spans))
    assert again.makespan == timeline.makespan
    assert [(s.rank, s.action, s.start, s.stop) for row in again.spans for s in row] == [
        (s.rank, s.action, s.start, s.stop) for s in spans]


def test_medians() -> None:
    spans = [Span(0, Forward(i, 0), i, i + length) for i, length in enumerate((1, 5, 2))]
    spans.append(Span(1, Backward(0, stage=1), 0, 0.5))
    times = stage_times(one_f_one_b(2, 3), spans)
    assert (times.forward, times.backward_input, times.backward_weight) == ([2, 0], [0, 0.5], [0, 0])
