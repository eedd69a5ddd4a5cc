"""ZB-H1, ZB-H2, ZB-V against the formulas of the paper, at equal and at unequal times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan.pipeline.draw import grid
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.stash import peak_bytes, peaks
from hpctrain.plan.pipeline.zero_bubble import zb_h1, zb_h2, zb_v
from hpctrain.plan.schedule import symbol


def idle(timeline):
    return [timeline.idle(rank) for rank in range(timeline.plan.num_ranks)]


def test_pictures():
    assert [row.rstrip() for row in grid(simulate(zb_h1(3, 4)).spans)] == [
        "F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3",
        ".  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ".  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert [row.rstrip() for row in grid(simulate(zb_v(2, 3)).spans, stages=True)] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .",
        ".   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_equal_times():
    h1, h2, v = (simulate(make(4, 8)) for make in (zb_h1, zb_h2, zb_v))
    assert (h1.makespan, idle(h1)) == (27, [3, 2, 1, 0])
    assert (h2.makespan, idle(h2)) == (27, [0, 0, 0, 0])  # no idle time inside, and yet no shorter: the barrier
    assert (v.makespan, idle(v)) == (25.5, [0, 0, 0, 0])
    assert [(p.stash, p.held) for p in peaks(h1.plan)] == [(4, 4), (3, 4), (2, 4), (1, 4)]
    assert [(p.stash, p.held) for p in peaks(h2.plan)] == [(7, 7), (5, 7), (3, 7), (1, 7)]
    assert [p.held for p in peaks(v.plan)] == [8, 8, 8, 8]  # half chunks: 1F1B's 4 on every rank


def test_unequal_times():
    times = Times((1,) * 4, (0.98,) * 4, (0.5,) * 4)
    h1, h2 = simulate(zb_h1(4, 8), times), simulate(zb_h2(4, 8), times)
    assert h1.bubble == pytest.approx(4.44, abs=1e-9)
    assert idle(h1) == pytest.approx([4.44, 2.96, 1.48, 0], abs=1e-9)
    assert idle(h2) == pytest.approx([2.94, 1.96, 0.98, 0], abs=1e-9)
    assert h2.bubble == pytest.approx(3, abs=1e-9)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_table_2(ranks, more, forward, backward, weight):
    weight = min(weight, forward, backward)
    micro_batches = 2 * ranks + more
    h1, h2 = zb_h1(ranks, micro_batches), zb_h2(ranks, micro_batches)
    ours = simulate(h1, Times.even(h1, forward, backward, weight))
    assert ours.bubble == (ranks - 1) * (forward + backward - weight)
    assert idle(ours) == [(ranks - 1 - r) * (forward + backward - weight) for r in range(ranks)]
    ours = simulate(h2, Times.even(h2, forward, backward, weight))
    assert idle(ours) == [(ranks - 1 - r) * (forward + backward - 2 * weight) for r in range(ranks)]
    assert ours.bubble == (ranks - 1) * max(forward, forward + backward - 2 * weight)
    assert peaks(h2)[0].stash == 2 * ranks - 1


@given(st.integers(1, 6), st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_the_v_is_never_idle(ranks, more):
    plan = zb_v(ranks, 2 * ranks - 1 + more)
    timeline = simulate(plan)
    assert idle(timeline) == [0] * ranks
    assert timeline.makespan == 3 * plan.num_micro_batches + (ranks - 1) / 2
    assert {p.held for p in peaks(plan)} == {min(2 * ranks, 2 * plan.num_micro_batches)}


def test_a_v_of_few_micro_batches_is_one_with_holes():
    whole = zb_v(3, 5)
    for count in range(1, 5):
        for order, full in zip(zb_v(3, count).orders, whole.orders):
            kept = [symbol(a, stages=True).rstrip("*") for a in full if getattr(a, "micro_batch", 0) < count]
            assert [symbol(a, stages=True).rstrip("*") for a in order] == kept


def test_bytes():
    assert peak_bytes(zb_h1(4, 8), [10] * 4, [3] * 4) == (40, 33, 26, 19)  # (p - i) activations, i weight parts
