"""What is about the whole model: its parameters brought together, and evaluations longer than one filling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pipeline_parity
import pytest

import hpctrain.numpy as n
from hpctrain.plan.pipeline.partition import explicit
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.pipelined import EVALUATED
from hpctrain.runtime.step import Trainer


def make(context: Any, sizes: list[int], pipeline: Pipeline) -> PipelineTrainer:
    layers, bounds = pipeline_parity.layers(tied=True), explicit(sizes, 8)
    return PipelineTrainer(context, lambda s: n.stage(layers, n.cross_entropy, bounds, s), pipeline,
                           **pipeline_parity.options())


@pytest.mark.parametrize(("ranks", "sizes", "pipeline"), [
    (1, [8], Pipeline("1f1b")), (3, [0, 8, 0], Pipeline("gpipe")), (2, [2, 3, 3, 0], Pipeline("zb-v")),
    (4, [3, 5], Pipeline("1f1b", ranks=2)),
])
def test_every_rank_sees_every_parameter_once(ranks: int, sizes: list[int], pipeline: Pipeline) -> None:
    batches = pipeline_parity.global_batch(3)

    def alone(context: Any) -> dict[str, np.ndarray]:
        trainer = Trainer(context, n.network(pipeline_parity.layers(), n.cross_entropy), **pipeline_parity.options())
        trainer.step([batch for _ in range(ranks // (pipeline.ranks or ranks)) for batch in batches])
        return {name: np.array(values) for name, values in trainer.parameters()}

    def run(context: Any) -> list[tuple[str, np.ndarray]]:
        trainer = make(context, sizes, pipeline)
        trainer.step(batches)
        return [(name, np.array(values)) for name, values in trainer.whole_parameters()]

    (expected,) = pipeline_parity.on_threads(1, alone)
    for found in pipeline_parity.on_threads(ranks, run):
        assert sorted(name for name, _ in found) == sorted(expected)
        for name, values in found:
            assert values == pytest.approx(expected[name], abs=1e-10), name


@pytest.mark.parametrize("number", [0, 1, 2 * EVALUATED, 2 * EVALUATED + 1, 4 * EVALUATED + 3])
def test_evaluations_of_any_length(number: int) -> None:
    batches = pipeline_parity.global_batch(number)

    def run(context: Any) -> tuple[float, float, int]:
        trainer = make(context, [3, 5], Pipeline("1f1b", ranks=2))
        taken: list[Any] = []
        result = trainer.evaluate(taken.append(batch) or batch for batch in batches)
        return result.loss, result.weight, len(taken)

    network = n.network(pipeline_parity.layers(), n.cross_entropy)
    terms = [network.forward(batch, training=False)[0] for batch in batches]
    weight = sum(weight for _, weight in terms)
    for loss, found, taken in pipeline_parity.on_threads(2, run):
        assert (found, taken) == (weight, number)
        assert loss * weight == pytest.approx(sum(loss for loss, _ in terms), rel=1e-12) or not number
