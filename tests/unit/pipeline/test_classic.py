"""Naive, GPipe, 1F1B and interleaved: the pictures and the papers' numbers."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.classic import gpipe, group_size, interleaved, naive, one_f_one_b, order_table
from hpctrain.plan.pipeline.draw import grid
from hpctrain.plan.pipeline.proof import prove
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.stash import peaks
from hpctrain.plan.schedule import Forward, accumulate


def picture(plan):
    several = len(plan.places) > plan.num_ranks
    return [row.rstrip() for row in grid(simulate(plan).spans, stages=several)]


def test_pictures():
    assert picture(naive(2, 2)) == [
        "F0 .  .  .  B0 -- F1 .  .  .  B1 --",
        ".  F0 B0 -- .  .  .  F1 B1 -- .  .",
    ]
    assert picture(gpipe(3, 3)) == [
        "F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --",
        ".  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .",
        ".  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .",
    ]
    assert picture(one_f_one_b(3, 3)) == [
        "F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --",
        ".  F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- .  .",
        ".  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  .  .",
    ]
    assert picture(one_f_one_b(3, 4)) == [
        "F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --",
        ".  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .",
        ".  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .",
    ]
    assert picture(interleaved(2, 2)) == [
        "0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---",
        ".   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- .   .",
    ]


def test_one_stage_is_accumulation():
    for m in (1, 2, 5):
        assert one_f_one_b(1, m).orders[0] == naive(1, m).orders[0] == tuple(accumulate(m))


def test_one_chunk_is_1f1b():
    for ranks, micro_batches in ((1, 1), (3, 2), (4, 9)):
        assert interleaved(ranks, micro_batches, 1).orders == one_f_one_b(ranks, micro_batches).orders


def test_the_order_table_of_megatron():
    assert [i for i, _ in order_table(5, 2, 3)] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [c for _, c in order_table(5, 2, 3)] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    order = interleaved(2, 5, 2, 3).orders[0]
    assert [(a.micro_batch, a.stage // 2) for a in order if isinstance(a, Forward)] == order_table(5, 2, 3)


@pytest.mark.parametrize("plan, makespan", [
    (gpipe(4, 8), 33), (one_f_one_b(4, 8), 33), (interleaved(4, 8, 2), 28.5), (interleaved(4, 8, 4), 26.25),
    (one_f_one_b(4, 2), 15), (one_f_one_b(8, 8), 45), (interleaved(4, 8, 1), 33), (naive(4, 8), 96),
    (gpipe(4, 8, 2), 28.5),
], ids=lambda value: getattr(value, "name", value))
def test_makespans(plan, makespan):
    assert simulate(plan).makespan == makespan


@pytest.mark.parametrize("plan, stash", [
    (interleaved(4, 8, 2), [11, 9, 7, 5]), (interleaved(4, 8, 4), [19, 17, 15, 13]), (one_f_one_b(4, 2), [2, 2, 2, 1]),
    (one_f_one_b(4, 8), [4, 3, 2, 1]), (gpipe(4, 8), [8, 8, 8, 8]), (naive(4, 8), [1, 1, 1, 1]),
], ids=lambda value: getattr(value, "name", ""))
def test_peaks(plan, stash):
    assert [peak.stash for peak in peaks(plan)] == stash


def test_peaks_of_larger_pipelines():
    assert peaks(interleaved(8, 16, 2))[0].stash == 23
    assert peaks(interleaved(8, 16, 4))[0].stash == 39


def test_the_denominator_of_the_bubble_is_named():
    timeline = simulate(one_f_one_b(4, 8))
    assert (timeline.ideal, timeline.bubble) == (24, 9)
    assert timeline.bubble_of_ideal == 3 / 8
    assert timeline.bubble_of_makespan == 3 / 11


def test_gpipe_table_2_transformer_32_micro_batches():
    """A model that knows only the bubble is an upper bound of what the paper measured, within 8 %."""
    def step(k, m):  # K partitions of a model whose forward takes 1, so that m micro-batches are m / 32 of a batch
        share = (1 / k,) * k
        return simulate(gpipe(k, m), Times(share, share, share)).makespan / m

    speeds = [step(2, 1) / step(k, 32) for k in (2, 4, 8)]
    assert speeds == pytest.approx([1.94, 3.66, 6.56], abs=5e-3)
    for ours, measured in zip(speeds, (1.8, 3.4, 6.3)):
        assert measured < ours < 1.08 * measured


@pytest.mark.parametrize("ranks, micro_batches, group", [
    (4, 8, 4), (4, 9, 5), (4, 5, 5), (4, 3, 3), (2, 5, 3), (3, 7, 4),
])
def test_the_group_of_micro_batches_that_do_not_divide(ranks, micro_batches, group):
    assert group_size(ranks, micro_batches) == group
    prove(interleaved(ranks, micro_batches, 3))


def test_an_illegal_group_is_refused():
    with pytest.raises(ConfigError, match=r"group = 4 must be .* 5 would do"):
        interleaved(4, 9, 2, 4)
    for sizes in ((0, 1), (1, 0), (1.5, 1), (True, 1)):
        for make in (naive, gpipe, one_f_one_b, interleaved):
            with pytest.raises(ConfigError, match="integer of at least 1"):
                make(*sizes)
