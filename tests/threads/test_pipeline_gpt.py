"""torch models in a pipeline, under every schedule that runs, equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pipeline_parity
import pytest
import torch
import torch_models

import hpctrain.torch
from hpctrain.adapters.torch.layers import Chain
from hpctrain.models import gpt
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.plan.pipeline.stash import stage_peaks
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import single


def network() -> tuple[torch.nn.Module, Chain]:
    """A GPT with tied ends."""
    module = gpt.GPT(GPTShape(layers=4, width=8, heads=2, context=6, vocabulary=11, tied=True), dtype=torch.float64)
    return module, hpctrain.torch.layers(module, module.steps())


def batches(number: int, updates: int = 2) -> list[list[Any]]:
    """Micro-batches of one or two rows."""
    generator = torch.Generator().manual_seed(4)
    return [[tuple(torch.randint(11, (1 + (i + update) % 2, 5), generator=generator) for _ in range(2))
             for i in range(number)] for update in range(updates)]


@pytest.fixture(scope="module")
def truth() -> Callable[[int], pipeline_parity.Seen]:
    """What one process sees, by the number of micro-batches."""
    known: dict[int, pipeline_parity.Seen] = {}

    def find(number: int) -> pipeline_parity.Seen:
        if number not in known:
            trainer = Trainer(parity.context_of(single()), hpctrain.torch.adapt(network()[0], gpt.loss),
                              **pipeline_parity.options())
            known[number] = pipeline_parity.observe(trainer, batches(number))
        return known[number]

    return find


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_gpt_equals_one_process(name: str, truth: Callable[[int], pipeline_parity.Seen]) -> None:
    for ranks, number in ((1, 2), (2, 1), (2, 5), (3, 4), (4, 8)):
        pipeline = Pipeline(name, chunks=2 if name == "interleaved" else None)
        expected = truth(number)

        def run(context: Any, pipeline: Pipeline = pipeline, number: int = number, expected: Any = expected) -> None:
            _, chain = network()
            stages = pipeline.first_plan(pipeline.num_ranks(context.size)).depth
            trainer = PipelineTrainer(
                context, lambda s: hpctrain.torch.stage(chain, stages, s, gpt.loss_of_logits, inputs=gpt.tokens_of),
                pipeline, **pipeline_parity.options())
            pipeline_parity.compare(pipeline_parity.observe(trainer, batches(number)), expected)
            planned = stage_peaks(trainer.plan(number))
            assert trainer.peaks == {stage: planned[stage] for stage in trainer.peaks}

        pipeline_parity.on_threads(ranks, run)


def test_two_pipelines_with_optimizer_states_in_parts(truth: Callable[[int], pipeline_parity.Seen]) -> None:
    expected = truth(4)

    def run(context: Any) -> None:
        _, chain = network()
        trainer = PipelineTrainer(
            context, lambda s: hpctrain.torch.stage(chain, 2, s, gpt.loss_of_logits, inputs=gpt.tokens_of),
            Pipeline("zb-h1", ranks=2), **pipeline_parity.options(zero=hpctrain.Zero(1, bucket_bytes=100)))
        shared = pipeline_parity.share(batches(4), trainer)
        pipeline_parity.compare(pipeline_parity.observe(trainer, shared), expected)

    pipeline_parity.on_threads(4, run)


@pytest.mark.parametrize("name", ["checkpoint", "frozen below", "ties", "odd", "attention"])
def test_any_module_between_two_layers(name: str) -> None:
    def make() -> torch.nn.Sequential:
        around = [torch.nn.Linear(torch_models.WIDTH, torch_models.WIDTH).double() for _ in range(2)]
        with torch.no_grad():
            for part in around:
                for parameter in part.parameters():
                    parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter))
        return torch.nn.Sequential(around[0], torch_models.make(name), around[1])

    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        return (outputs - batch[1]).square().sum(), float(outputs.numel())

    updates = [torch_models.batches(3, 2), torch_models.batches(3, 2)]
    trainer = Trainer(parity.context_of(single()), hpctrain.torch.adapt(make(), lambda m, b: loss(m(b[0]), b)),
                      **pipeline_parity.options())
    expected = pipeline_parity.observe(trainer, updates)

    def run(context: Any) -> None:
        chain = hpctrain.torch.layers(make())
        trainer = PipelineTrainer(context, lambda s: hpctrain.torch.stage(chain, 3, s, loss), Pipeline("zb-h1"),
                                  **pipeline_parity.options())
        pipeline_parity.compare(pipeline_parity.observe(trainer, updates), expected)

    pipeline_parity.on_threads(3, run)
