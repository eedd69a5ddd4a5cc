"""torch modules in stages equal one process, under every schedule: tied, frozen, nests between stages, resumed."""

from __future__ import annotations

from typing import Any

import numpy as np
import parity
import pytest
import torch
from torch import nn

import hpctrain
import hpctrain.torch
from hpctrain.plan.pipeline.partition import uniform
from hpctrain.plan.split import part
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads, single

VOCAB, OPTIONS = 7, {"optimizer": hpctrain.AdamW(lr=0.02, weight_decay=0.1), "clip_norm": 0.4,
                     "zero": hpctrain.Zero(1, bucket_bytes=100)}


class Open(nn.Module):
    """Tokens -> a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 5)

    def forward(self, tokens: torch.Tensor) -> Any:
        seen = [tokens, tokens > 2]
        return {"x": self.table(tokens), "seen": seen, "unused": torch.ones(2).double(), "n": len(tokens)}


class Step(nn.Module):
    """A nest -> a nest; masks with its booleans."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, width), nn.Linear(width, 5, bias=False), nn.LayerNorm(5)

    def forward(self, nest: Any) -> Any:
        x = nest["x"] + self.down(torch.tanh(self.up(self.norm(nest["x"]))))
        return {**nest, "x": torch.where(nest["seen"][1][:, None], x, x / nest["n"])}


class Close(nn.Module):
    """A nest -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, VOCAB, bias=False)

    def forward(self, nest: Any) -> torch.Tensor:
        return self.head(nest["x"])


def network(frozen: tuple[int, ...] = (), tied: bool = True) -> nn.Sequential:
    made = nn.Sequential(Open(), *(Step() for _ in range(4)), Close()).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    if tied:
        made[5].head.weight = made[0].table.weight
    for i in frozen:
        made[i].requires_grad_(False)
    return made


def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


def batches(number: int, update: int) -> list[Any]:
    g = torch.Generator().manual_seed(update)
    return [tuple(torch.randint(VOCAB, (1 + i % 3,), generator=g) for _ in range(2)) for i in range(number)]


DATA = [batches(5, u) for u in range(3)]


def observe(trainer: Trainer, data: Any) -> Any:
    results = [trainer.step(batch) for batch in data]
    weights = {name: np.asarray(w) for name, w in trainer.parameters()}
    return [r.loss for r in results], [r.gradient_norm for r in results], trainer.evaluate(data[0]).loss, weights


def alone(**how: Any) -> Any:
    model = hpctrain.torch.adapt(network(**how), lambda module, batch: loss(module(batch[0]), batch))
    return observe(Trainer(parity.context_of(single()), model, **OPTIONS), DATA)


def pipelined(context: Any, pipeline: Pipeline, **how: Any) -> PipelineTrainer:
    cut = uniform(6, pipeline.first_plan(pipeline.num_ranks(context.size)).depth)
    chain = hpctrain.torch.layers(network(**how))
    return PipelineTrainer(context, lambda s: hpctrain.torch.stage(chain, cut, s, loss), pipeline, **OPTIONS)


def share(trainer: PipelineTrainer, data: Any) -> Any:
    return [batch[slice(*part(len(batch), trainer.mesh["data"], trainer.rank))] for batch in data]


def check(size: int, pipeline: Pipeline, **how: Any) -> None:
    truth = alone(**how)

    def run(transport: Any) -> None:
        trainer = pipelined(parity.context_of(transport), pipeline, **how)
        *numbers, weights = observe(trainer, share(trainer, DATA))
        for mine, theirs in zip(numbers, truth, strict=False):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, truth[3][name], rtol=1e-9, atol=1e-10, err_msg=name)

    run_threads(size, run)


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_every_schedule_equals_one_process(name: str, size: int, ranks: int) -> None:
    check(size, Pipeline(name, ranks))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("frozen", [(0, 1), (2, 3), (1, 2, 3, 4)])
def test_frozen_stages(name: str, frozen: tuple[int, ...]) -> None:
    check(3, Pipeline(name), frozen=frozen, tied=False)


def test_one_process_goes_on_from_a_pipelines_checkpoint(tmp_path: Any) -> None:
    def run(transport: Any) -> None:
        trainer = pipelined(parity.context_of(transport), Pipeline("zb-h1", 2))
        for batch in share(trainer, DATA[:2]):
            trainer.step(batch)
        trainer.save(tmp_path)

    run_threads(4, run)
    model = hpctrain.torch.adapt(network(), lambda module, batch: loss(module(batch[0]), batch))
    trainer = Trainer(parity.context_of(single()), model, **OPTIONS)
    trainer.resume(tmp_path, policy="require")
    assert trainer.step(DATA[2]).loss == pytest.approx(alone()[0][2], rel=1e-10)


def test_two_copies_save_running_statistics_and_random_state_by_stage_of_the_model(tmp_path: Any) -> None:
    """The rank in the middle has its stage in both copies, with one set of buffers."""
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def squares(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        return (outputs - batch[1]).square().sum(), len(batch[1])

    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(5, 3, generator=generator).double(), torch.randn(5, 2, generator=generator).double())
            for _ in range(6)]

    def trainer_of(transport: Any) -> PipelineTrainer:
        chain = hpctrain.torch.layers(make())
        return PipelineTrainer(parity.context_of(transport), lambda s: hpctrain.torch.stage(chain, 3, s, squares),
                               Pipeline("dualpipe"), **OPTIONS)

    def first(transport: Any) -> tuple[int, float]:
        trainer = trainer_of(transport)
        trainer.step(data)
        names = [{"0.torch_rng", "2.torch_rng"}, {"1.torch_rng"}, {"0.torch_rng", "2.torch_rng"}]
        assert trainer.model.rank_state().keys() == names[transport.rank]
        trainer.save(tmp_path)
        return int(trainer.model.buffers().get("1.num_batches_tracked", -1)), trainer.evaluate(data).loss

    def again(transport: Any) -> tuple[int, float]:
        trainer = trainer_of(transport)
        trainer.resume(tmp_path, policy="require")
        return int(trainer.model.buffers().get("1.num_batches_tracked", -1)), trainer.evaluate(data).loss

    saved = run_threads(3, first)
    assert [batches for batches, _ in saved] == [-1, 6, -1]  # of both copies
    for (batches, loss), (_, truth) in zip(run_threads(3, again), saved, strict=True):
        assert loss == pytest.approx(truth, rel=1e-12)
        assert batches in (6, -1)
    model = hpctrain.torch.adapt(make(), lambda module, batch: squares(module(batch[0]), batch))
    alone = Trainer(parity.context_of(single()), model, **OPTIONS)
    alone.resume(tmp_path, policy="require")
    assert alone.evaluate(data).loss == pytest.approx(saved[0][1], rel=1e-12)
