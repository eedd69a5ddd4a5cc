"""The automatic schedule keeps its limit and is never worse than the handcrafted ones that keep it, too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.automatic import automatic, memory_peaks
from hpctrain.plan.pipeline.proof import prove
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.zero_bubble import zb_h1, zb_h2

times_of_a_stage = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))


@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.integers(1, 10), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@settings(max_examples=80, deadline=None)
def test_any_times_and_limits(data, ranks, micro_batches, limit, weight_part):
    rows = data.draw(st.lists(times_of_a_stage, min_size=ranks, max_size=ranks))
    times = Times(*zip(*rows), message=data.draw(st.integers(0, 3)))
    plan = automatic(ranks, micro_batches, times, limit, weight_part)
    prove(plan)
    assert max(memory_peaks(plan, weight_part)) <= limit
    for other in (zb_h1(ranks, micro_batches), zb_h2(ranks, micro_batches)):
        if max(memory_peaks(other, weight_part)) <= limit:
            assert simulate(plan, times).makespan <= simulate(other, times).makespan


def test_numbers():
    assert simulate(automatic(4, 8)).makespan == 27
    times = Times((1,) * 4, (0.98,) * 4, (0.5,) * 4)
    assert simulate(automatic(4, 8, times), times).bubble <= 4.44 + 1e-9
    assert simulate(automatic(4, 8, times, limit=5), times).bubble < 4.44 - 0.1  # more memory, less bubble
    assert simulate(automatic(4, 8, times, limit=7), times).bubble == pytest.approx(3, abs=1e-9)
    assert simulate(automatic(4, 8, limit=1)).makespan == 72


def test_it_searches():
    """Stages of unequal speed: something better than both handcrafted schedules is found."""
    times = Times((1, 1, 1, 3), (1, 1, 1, 3), (1, 1, 1, 2))
    best = min(simulate(make(4, 8), times).makespan for make in (zb_h1, zb_h2))
    assert simulate(automatic(4, 8, times, limit=7), times).makespan <= best


@pytest.mark.parametrize("options, match", [
    ({"limit": 0.5}, "memory limit = 0.5"), ({"limit": float("nan")}, "memory limit"),
    ({"weight_part": 2}, "weight part = 2"), ({"times": Times((1,), (1,), (1,))}, "times for 1 stages"),
])
def test_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        automatic(2, 3, **options)
