"""Every schedule, run on NumPy stages, equals one process: loss, gradients, norm, weights, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pipeline_cases
import pipeline_parity as pp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_parity import check, truth

import hpctrain
import hpctrain.numpy as n
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.text import from_text, plan_to_text
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward
from hpctrain.runtime.pipeline_options import Pipeline


@cache
def all_numbers() -> tuple[list[Any], pp.Seen]:
    batches = [pp.global_batch(number, update, rows=2) for update, number in enumerate(pipeline_cases.NUMBERS)]
    return batches, pp.alone(batches, pp.layers())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), pipeline_cases.CHUNKS)
def test_every_schedule_equals_one_process(name: str, chunks: int | None, num_ranks: int) -> None:
    batches, expected = all_numbers()
    pp.on_threads(num_ranks, lambda context: pp.case(context, expected, Pipeline(name, chunks=chunks), batches))


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_many_chunks_equal_one_process(name: str) -> None:
    check(2, Pipeline(name, chunks=20), 3)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("name", "ranks", "size", "number"), [
    ("1f1b", 2, 4, 5), ("zb-v", 2, 4, 6), ("interleaved", 2, 6, 7), ("gpipe", 1, 3, 4), ("dualpipe-v", 2, 6, 2),
    ("zb-h1", 3, 6, 1), ("dualpipe", 1, 2, 3), ("dualpipe", 2, 4, 5), ("dualpipe", 3, 6, 7), ("dualpipe", 4, 4, 3),
    ("dualpipe", 2, 6, 1),
])
def test_a_data_axis_beside_it(name: str, ranks: int, size: int, number: int, stage: int) -> None:
    """Pipelines have different numbers of micro-batches, the last cases none at all on some."""
    seen = check(size, Pipeline(name, ranks), number, 3, zero=hpctrain.Zero(stage, bucket_bytes=100))
    for parameter in ("0.weight", "1.weight", "3.weight", "5.weight"):
        copies = [s.weights[parameter] for s in seen if parameter in s.weights]
        assert len(copies) >= size // ranks
        assert all(np.array_equal(copies[0], copy) for copy in copies)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(pipeline_cases.CHUNKS), st.integers(1, 3), st.integers(1, 2),
       st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 1), st.booleans())
def test_any_schedule_of_any_size(which: Any, ranks: int, pipelines: int, numbers: Sequence[int], zero: int,
                                  wrap: bool) -> None:
    """Between stages go arrays, or nests that change from one micro-batch to the next."""
    name, chunks = which
    batches = [pp.numbered(number, update) for update, number in enumerate(numbers)]
    expected = pp.alone(batches, pp.layers())
    pp.on_threads(ranks * pipelines, lambda context: pp.case(
        context, expected, Pipeline(name, ranks, chunks), batches, wrap=wrap,
        zero=hpctrain.Zero(zero, bucket_bytes=100)))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plan=pipeline_cases.runnable(), data=st.data())
def test_any_plan_that_can_run(plan: Any, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 8), min_size=plan.depth - 1, max_size=plan.depth - 1)))
    zero = hpctrain.Zero(data.draw(st.sampled_from((0, 1))), bucket_bytes=100)
    check(plan.num_ranks, Pipeline(from_text(plan_to_text(plan))), plan.num_micro_batches, 1, bounds=(0, *cuts, 8),
          zero=zero)


@pytest.mark.parametrize("frozen", [(0, 1, 3), (7,), (3, 5)])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_frozen_stages(name: str, frozen: tuple[int, ...]) -> None:
    how = {"tied": False, "frozen": frozen}
    expected = truth(4, 2, **how)
    batches = [pp.global_batch(4, u) for u in range(2)]
    pp.on_threads(3, lambda context: pp.case(context, expected, Pipeline(name), batches, make=lambda: pp.layers(**how)))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_no_gradient_comes_back_to_where_nothing_is_trained(name: str) -> None:
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(name), make=lambda: pp.layers(tied=False, frozen=(0, 1, 3)))
        trainer.step(pp.global_batch(4))
        for stage, receiver in trainer._run._receivers.items():  # stages begin with layers 0, 2, 4, 6; 5 is trained
            (leaf,) = receiver._history.form.leaves
            assert leaf.gradient == (stage % 4 == 3)
            assert receiver._frame is None  # nothing is awaited that does not come

    pp.on_threads(4, run)


@pytest.mark.parametrize("bounds", [(0, 0, 4, 8), (0, 4, 4, 8), (0, 3, 8, 8), (0, 0, 0, 8), (0, 8, 8, 8)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_empty_stages(name: str, bounds: tuple[int, ...]) -> None:
    check(3, Pipeline(name), 5, bounds=bounds)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe"])
def test_masters_of_another_type(name: str, zero: int) -> None:
    how = {"precision": hpctrain.Precision(compute="float32", master="float64", accumulate="float64"),
           "zero": hpctrain.Zero(zero, bucket_bytes=100)}
    batches = [pp.global_batch(4, u) for u in range(3)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(6, lambda context: pp.case(context, expected, Pipeline(name, 3), batches, tolerance=1e-5, **how))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe"])
def test_sums_that_travel_in_another_type_do_not_hold_up_a_pipeline(name: str) -> None:
    """Many buckets, few windows, pipelines with different numbers of micro-batches."""
    how = {"precision": hpctrain.Precision(compute="float64", reduce="float32")}
    batches = [pp.global_batch(5, u) for u in range(2)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(6, lambda context: pp.case(context, expected, Pipeline(name, 2), batches, tolerance=1e-5, **how))


def test_two_pipelines_that_wait_for_each_other_in_the_middle() -> None:
    """Sums that pass through windows wait for the other pipeline, each in the place where the other needs it to go on.

        with 1 micro-batch     rank 0  ... I4 W4* I2 I0 ...           rank 1  ... I5 I3 I1 W5* ...
        with 2                 rank 0  ... I4 I2 I0 W4* ...           rank 1  ... I5 W5* I3 I1 ...

    Were sums waited for at the stars: W4* of the first waits for that of the second, which comes after I3, which comes
    after W5*, which waits for that of the first, which comes after I1, which needs I2, which comes after W4*.
    """
    rows = {1: ("F0 F2 F4 I4 W4 I2 I0 W2 W0", "F1 F3 F5 I5 I3 I1 W5 W3 W1"),
            2: ("F0 F2 F4 I4 I2 I0 W4 W2 W0", "F1 F3 F5 I5 W5 I3 I1 W3 W1")}
    kinds = {"F": Forward, "I": BackwardInput, "W": BackwardWeight}

    def function(ranks: int, number: int) -> Any:
        orders = [[kinds[kind](micro_batch=i, stage=int(stage)) for kind, stage in row.split() for i in range(number)]
                  for row in rows[number]]
        return make_plan("crossed", number, (0, 1) * 3, orders)

    def make() -> list[Any]:
        generator = np.random.default_rng(1)
        return [n.Linear(n.Parameter(generator.normal(size=(3, 3)))) for _ in range(18)]  # each a bucket, 3 a stage

    generator = np.random.default_rng(2)
    batches = [[(generator.normal(size=(2, 3)), generator.integers(3, size=2)) for _ in range(3)] for _ in range(2)]
    how = {"precision": hpctrain.Precision(compute="float64", reduce="float32"),
           "zero": hpctrain.Zero(bucket_bytes=1)}
    expected = pp.alone(batches, make(), **how)
    pp.run_threads(4, lambda transport: pp.case(
        pp.parity.context_of(transport), expected, Pipeline(function, 2), batches, make=make, tolerance=1e-5, **how),
        timeout=15)


def test_a_rank_without_a_stage() -> None:
    def function(ranks: int, number: int) -> Any:
        orders = [[], [Forward(i, s) for i in range(number) for s in range(2)]
                  + [Backward(i, stage=s) for i in range(number) for s in (1, 0)]]
        return make_plan("second", number, (1, 1), orders)

    def run(context: Any) -> None:
        pp.case(context, truth(3), Pipeline(function), [pp.global_batch(3, u) for u in range(2)])
        report = pp.pipelined(context, Pipeline(function)).memory_report()
        assert "parameters" in report and context.world.broadcast_value(report)[:99] == report[:99]

    pp.on_threads(2, run)


def test_a_loss_scale_is_that_of_one_process() -> None:
    how = {"loss_scale": hpctrain.LossScale(initial=64.0)}
    batches = [pp.global_batch(4, u) for u in range(2)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(2, lambda context: pp.case(context, expected, Pipeline("zb-v"), batches, **how))
