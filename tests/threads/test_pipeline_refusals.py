"""What a pipeline refuses, on all ranks alike and before anything runs; and steps that are skipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest
import stage_cases
import torch
from torch import nn

import hpctrain
import hpctrain.numpy as n
from hpctrain.errors import ConfigError, NonFiniteError, PlanError, UnsupportedError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer


def broken(how: str) -> Any:
    plan = schedule("1f1b", 2, 2)
    first, second = plan.orders
    f0, b0, f1, *rest = second  # rank 0 has F0 F1 B0 B1
    orders = {"missing": (first[1:], second), "twice": ((first[0], *first), second),
              "cycle": ((first[0], first[2], first[1], *first[3:]), (f1, f0, b0, *rest))}[how]
    return replace(plan, orders=orders)


@pytest.mark.parametrize("how", ["missing", "cycle", "twice"])
def test_a_broken_plan_is_refused_before_anything_runs(how: str) -> None:
    made = []

    def run(context: Any) -> None:
        with pytest.raises(PlanError):
            PipelineTrainer(context, made.append, Pipeline(broken(how)), **pp.options())

    pp.on_threads(2, run)
    assert not made


def test_a_plan_that_breaks_later_is_refused_before_it_runs() -> None:
    def function(ranks: int, number: int) -> Any:
        return schedule("1f1b", ranks, number) if number < 2 else broken("cycle")

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(function))
        assert trainer.step(pp.global_batch(1)).skipped == ""
        with pytest.raises(PlanError):
            trainer.step(pp.global_batch(2))
        assert trainer.step(pp.global_batch(1)).update == 2

    pp.on_threads(2, run)


def test_a_plan_that_updates_several_times_only_later_is_refused() -> None:
    """Which trainer it takes is decided once."""
    def function(ranks: int, number: int) -> Any:
        plan = schedule("pipedream", ranks, number)
        return replace(plan, weights="one") if number == 1 else plan

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(function))
        assert trainer.step(pp.global_batch(1)).update == 1
        with pytest.raises(UnsupportedError, match="'pipedream' for 2 micro-batches has several updates or versions"):
            trainer.step(pp.global_batch(2))

    pp.on_threads(2, run)


def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    def run(context: Any) -> None:
        for how, text in (({"zero": hpctrain.Zero(2)}, "zero.stage = 2"), ({"zero": hpctrain.Zero(3)}, "stage = 3"),
                          ({"zero": hpctrain.Zero(1, offload=hpctrain.Offload(delay=True))}, "zero.offload")):
            with pytest.raises(UnsupportedError, match=text):
                pp.pipelined(context, Pipeline("1f1b"), **how)
        with pytest.raises(ConfigError, match="does not divide"):
            Pipeline("1f1b", ranks=3).num_ranks(4)
        with pytest.raises(ConfigError, match="takes no chunks"):
            pp.pipelined(context, Pipeline("1f1b", chunks=2))
        with pytest.raises(ConfigError, match="is unknown"):
            pp.pipelined(context, Pipeline("1f2b"))
        with pytest.raises(ConfigError, match="has 1 models"):
            PipelineTrainer(context, [None], Pipeline("1f1b"), **pp.options())
        trainer = pp.pipelined(context, Pipeline(schedule("1f1b", 2, 4)))
        with pytest.raises(ConfigError, match="4 micro-batches, not for 2 and 3"):
            trainer.step(pp.global_batch(3))
        with pytest.raises(ConfigError, match="1 micro-batches on rank 0 of the pipeline, 2 on rank 1"):
            trainer.step(pp.global_batch(context.rank + 1))
        with pytest.raises(UnsupportedError, match="only some stages"):
            trainer.model.forward(None)

    pp.on_threads(2, run)


def test_a_shared_name_means_a_shared_parameter() -> None:
    def run(context: Any) -> None:
        def stage(s: int) -> Any:
            return n.stage([n.Linear(n.Parameter(np.ones((2, 2 + s))))], n.cross_entropy, (0, 1), 0)

        with pytest.raises(ConfigError, match="parameter '0.weight' is .* in stage 1"):
            PipelineTrainer(context, stage, Pipeline("1f1b"), **pp.options())

    pp.on_threads(2, run)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("name", "rank"), [("1f1b", 1), ("dualpipe", 1)])
def test_what_is_not_finite_is_skipped_by_all_stages(name: str, rank: int) -> None:
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(name), max_skips=2)
        before = {parameter: np.array(w) for parameter, w in trainer.parameters()}
        with trainer.gathered(modify=0) as model:
            if context.rank == 0:
                model.parameter("1.bias")[0] = np.nan
        assert trainer.step(pp.global_batch(3)).skipped == "not finite"
        for parameter, weight in trainer.parameters():
            if parameter != "1.bias":
                assert np.array_equal(weight, before[parameter])
        with pytest.raises(NonFiniteError, match=f"rank {rank}, micro-batch 0: the loss is nan"):
            trainer.step(pp.global_batch(3))
        assert trainer.step([]).skipped == "no data"

    pp.on_threads(2, run)


class Root(nn.Module):
    """The square root, whose derivative at 0 is not finite; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x.square().sqrt()


@pytest.mark.parametrize(("name", "ranks", "rank"), [("1f1b", 4, 2), ("zb-v", 2, 1), ("gpipe", 1, 0)])
@pytest.mark.parametrize("bad", [0, 2])
def test_what_is_not_finite_is_told_by_the_stage_that_came_upon_it_first(name: str, ranks: int, rank: int,
                                                                         bad: int) -> None:
    """The gradients of all stages below are not finite either."""
    def make() -> nn.Module:
        layers = [nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(3)]
        return nn.Sequential(*layers, nn.Sequential(Root(), nn.Linear(2, 2, dtype=torch.float64)))

    task = stage_cases.Task(make, lambda y, batch: (y.square().sum(), 1.0))
    batch = [(torch.ones(1, 2, dtype=torch.float64) * (i != bad),) for i in range(3)]

    def run(context: Any) -> None:
        bounds = range(5) if ranks > 1 else (0, 4)
        trainer = task.pipelined(context, Pipeline(name), bounds=tuple(bounds), non_finite="stop")
        with pytest.raises(NonFiniteError, match=rf"\(rank {rank}, micro-batch {bad}: the gradient of '2.weight'\)"):
            trainer.step(batch)
        assert all(int(count) == 3 for count in trainer.model.buffers().values())

    pp.on_threads(ranks, run)
