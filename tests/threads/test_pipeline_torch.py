"""torch modules in stages equal one process, under every schedule: ties, frozen layers, nests, any module, a GPT."""

from __future__ import annotations

from functools import cache
from typing import Any

import pipeline_cases
import pipeline_parity as pp
import pytest
import stage_cases
import torch
import torch_models
from torch import nn

import hpctrain
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline

PLAIN, NESTS, GPT = stage_cases.plain(), stage_cases.nests(), stage_cases.small_gpt()
LENGTHS = [[1 + (i + u) % 3 for i in range(5)] for u in range(3)]
BATCHES = [stage_cases.numbered(lengths, u) for u, lengths in enumerate(LENGTHS)]
ZERO_1 = hpctrain.Zero(1, bucket_bytes=100)


@cache
def truth(frozen: tuple[int, ...] = (), tied: bool = True) -> pp.Seen:
    return pp.observe(stage_cases.nests(frozen, tied).whole(), BATCHES)


@cache
def all_numbers() -> tuple[list[Any], pp.Seen]:
    batches = [stage_cases.numbered([1 + (i + u) % 2 for i in range(number)], u)
               for u, number in enumerate(pipeline_cases.NUMBERS)]
    return batches, pp.observe(PLAIN.whole(), batches)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), pipeline_cases.CHUNKS)
def test_every_schedule_equals_one_process(name: str, chunks: int | None, num_ranks: int) -> None:
    PLAIN.check(num_ranks, Pipeline(name, chunks=chunks), *all_numbers())


@pytest.mark.parametrize("name", RUNNABLE)
def test_nests_between_stages_and_a_data_axis_beside_them(name: str) -> None:
    NESTS.check(4, Pipeline(name, 2), BATCHES, truth(), zero=ZERO_1)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("frozen", [(0, 1), (2, 3), (1, 2, 3, 4)])
def test_frozen_stages(name: str, frozen: tuple[int, ...]) -> None:
    stage_cases.nests(frozen, tied=False).check(3, Pipeline(name), BATCHES, truth(frozen, False))


def test_one_process_goes_on_from_a_pipelines_checkpoint(tmp_path: Any) -> None:
    def run(context: Any) -> None:
        trainer = NESTS.pipelined(context, Pipeline("zb-h1", 2), zero=ZERO_1)
        for batch in pp.share(BATCHES[:2], trainer):
            trainer.step(batch)
        trainer.save(tmp_path)

    pp.on_threads(4, run)
    trainer = NESTS.whole()
    trainer.resume(tmp_path, policy="require")
    assert trainer.step(BATCHES[2]).loss == pytest.approx(truth().losses[2], rel=pp.TOLERANCE)


@cache
def tokens(number: int) -> list[list[Any]]:
    """Micro-batches of one or two rows, two updates."""
    generator = torch.Generator().manual_seed(4)
    return [[tuple(torch.randint(11, (1 + (i + update) % 2, 5), generator=generator) for _ in range(2))
             for i in range(number)] for update in range(2)]


@cache
def gpt_truth(number: int) -> pp.Seen:
    return pp.observe(GPT.whole(), tokens(number))


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_gpt_equals_one_process(name: str) -> None:
    for ranks, number in ((2, 1), (3, 5)):
        pipeline = Pipeline(name, chunks=2 if name == "interleaved" else None)
        GPT.check(ranks, pipeline, tokens(number), gpt_truth(number))


def test_two_pipelines_with_optimizer_states_in_parts() -> None:
    GPT.check(4, Pipeline("zb-h1", ranks=2), tokens(5), gpt_truth(5), zero=ZERO_1)


@pytest.mark.parametrize("name", ["checkpoint", "frozen below", "ties", "odd", "attention"])
def test_any_module_between_two_layers(name: str) -> None:
    def make() -> nn.Sequential:
        around = [nn.Linear(torch_models.WIDTH, torch_models.WIDTH).double() for _ in range(2)]
        with torch.no_grad():
            for part in around:
                for parameter in part.parameters():
                    parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter))
        return nn.Sequential(around[0], torch_models.make(name), around[1])

    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        return (outputs - batch[1]).square().sum(), float(outputs.numel())

    task, updates = stage_cases.Task(make, loss), [torch_models.batches(3, 2), torch_models.batches(3, 2)]
    task.check(3, Pipeline("zb-h1"), updates, pp.observe(task.whole(), updates))


def test_two_copies_save_running_statistics_and_random_state_by_stage_of_the_model(tmp_path: Any) -> None:
    """The rank in the middle has its stage in both copies, with one set of buffers."""
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    task = stage_cases.Task(make, lambda y, batch: ((y - batch[1]).square().sum(), len(batch[1])))
    generator = torch.Generator().manual_seed(3)
    data = [tuple(torch.randn(5, width, generator=generator).double() for width in (3, 2)) for _ in range(6)]

    def first(context: Any) -> tuple[int, float]:
        trainer = task.pipelined(context, Pipeline("dualpipe"), zero=ZERO_1)
        trainer.step(data)
        names = [{"0.torch_rng", "2.torch_rng"}, {"1.torch_rng"}, {"0.torch_rng", "2.torch_rng"}]
        assert trainer.model.rank_state().keys() == names[context.rank]
        trainer.save(tmp_path)
        return int(trainer.model.buffers().get("1.num_batches_tracked", -1)), trainer.evaluate(data).loss

    def again(context: Any) -> tuple[int, float]:
        trainer = task.pipelined(context, Pipeline("dualpipe"), zero=ZERO_1)
        trainer.resume(tmp_path, policy="require")
        return int(trainer.model.buffers().get("1.num_batches_tracked", -1)), trainer.evaluate(data).loss

    saved = pp.on_threads(3, first)
    assert [number for number, _ in saved] == [-1, 6, -1]  # of both copies
    for (number, loss), (_, truth) in zip(pp.on_threads(3, again), saved, strict=True):
        assert loss == pytest.approx(truth, rel=1e-12)
        assert number in (6, -1)
    task.whole().resume(tmp_path, policy="require")
