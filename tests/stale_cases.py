"""The delayed update, carried out one after the other in plain torch, and pipelines that must follow it.

    w(t + 1) = w(t) - lr grad f(w0 of one version, w1 of another, ...)

Nothing of hpctrain is used by `simulate`: which version a stage uses is written down here once more, from the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pipeline_parity as pp
import torch
from torch import nn

import hpctrain
import hpctrain.numpy as n
import hpctrain.torch
from hpctrain.plan.pipeline.partition import uniform
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.stale import StaleTrainer

#: `version(update, number, stage)` of the weights that micro-batch `number` of an update (both from 0) uses in a stage.
Version = Callable[[int, int, int], int]


def delayed(name: str, ranks: int) -> Version:
    """The delays of the papers (PipeDream, section 3.3; PipeDream-2BW, section 3.1)."""
    return {
        "pipedream": lambda t, i, s: max(0, t - (ranks - 1 - s)),
        "pipedream-vertical": lambda t, i, s: max(0, t - (ranks - 1)),
        "pipedream-2bw": lambda t, i, s: max(0, t - 1),
    }[name]


class Flat(nn.Embedding):
    """The vectors of a row side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(1)


class Scale(nn.Module):
    """Its backward reads the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def twin() -> nn.Sequential:
    """`pipeline_parity.layers`, untied, in torch under the same names."""
    made = nn.Sequential(Flat(7, 4), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 5), nn.GELU("tanh"),
                         nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 7, bias=False)).double()
    with torch.no_grad():
        for i, layer in enumerate(pp.layers(tied=False)):
            for name, parameter in layer.parameters.items():
                made[i].get_parameter(name).copy_(torch.tensor(parameter.value))
    return made


def other() -> nn.Sequential:
    """With layers that save parameters in other ways."""
    made = nn.Sequential(Flat(7, 4), nn.Linear(12, 5), nn.LayerNorm(5), nn.Tanh(), Scale(), nn.Linear(5, 5),
                         nn.LayerNorm(5), nn.Linear(5, 7, bias=False)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return made


def entropy(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    targets = torch.as_tensor(batch[1])
    return nn.functional.cross_entropy(outputs, targets, reduction="sum"), float(len(targets))


def as_torch(batches: Sequence[Any]) -> list[Any]:
    return [tuple(map(torch.as_tensor, batch)) for batch in batches]


@dataclass
class Run:
    """What is compared."""

    losses: list[float]
    weights: dict[str, np.ndarray]


def simulate(net: nn.Sequential, stage_of: Callable[[str], int], version: Version,
             steps: Sequence[Sequence[Sequence[Any]]], optimizer: Any, lr: Callable[[int], float] | None = None) -> Run:
    """`steps[step][update]` are the micro-batches of an update; staleness begins anew with each step."""
    masters = {name: p.detach().clone() for name, p in net.named_parameters()}
    rule = optimizer(list(masters.values()))
    losses, count = [], 0
    for updates in steps:
        history = [{name: w.clone() for name, w in masters.items()}]
        total = weight = 0.0
        for t, batches in enumerate(updates):
            mixed = [{name: history[version(t, i, stage_of(name))][name].clone().requires_grad_() for name in masters}
                     for i in range(len(batches))]
            terms = [entropy(torch.func.functional_call(net, mine, (torch.as_tensor(b[0]),)), b)
                     for mine, b in zip(mixed, batches, strict=True)]
            here = sum(w for _, w in terms)
            loss = torch.stack([term for term, _ in terms]).sum()
            (loss / here).backward()
            for name, master in masters.items():
                master.grad = torch.stack([mine[name].grad for mine in mixed]).sum(0)
            if lr is not None:
                rule.param_groups[0]["lr"] = lr(count)
            rule.step()
            count += 1
            history.append({name: w.detach().clone() for name, w in masters.items()})
            total, weight = total + float(loss.detach()), weight + here
        losses.append(total / weight)
    return Run(losses, {name: w.numpy() for name, w in masters.items()})


def stage_of(bounds: Sequence[int]) -> Callable[[str], int]:
    """The stage of a parameter by its name, which begins with its layer."""
    return lambda name: next(s for s in range(len(bounds) - 1) if int(name.split(".")[0]) < bounds[s + 1])


RULES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (hpctrain.SGD(lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adamw": (hpctrain.AdamW(lr=0.02, weight_decay=0.1, eps=1e-4),
              lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1, eps=1e-4)),
}


def trainer(context: Any, pipeline: Pipeline, kind: str = "numpy", bounds: Sequence[int] | None = None,
            wrap: Callable[[Any], Any] = lambda stage: stage, **options: Any) -> StaleTrainer:
    """Of stages in NumPy ("numpy"), or in torch ("torch": the same; "other")."""
    stages = len(pipeline.first_plan(pipeline.num_ranks(context.size)).places)
    cut = bounds or uniform(8, stages)
    if kind == "numpy":
        made = pp.layers(tied=False)
        return StaleTrainer(context, lambda s: wrap(n.stage(made, n.cross_entropy, cut, s)), pipeline, **options)
    chain = hpctrain.torch.layers({"torch": twin, "other": other}[kind]())
    return StaleTrainer(context, lambda s: wrap(hpctrain.torch.stage(chain, cut, s, entropy)), pipeline, **options)


def data(step: int, pipelines: int, number: int) -> list[list[Any]]:
    """So many micro-batches for each pipeline; they weigh 1 to 3."""
    batches = pp.global_batch(number * pipelines, step)
    return [batches[d::pipelines] for d in range(pipelines)]


def grouped(batches: Sequence[Sequence[Any]], per_update: int) -> list[list[Any]]:
    """The micro-batches of each update, of all pipelines."""
    number = len(batches[0])
    return [[batch for of_one in batches for batch in of_one[a : a + per_update]]
            for a in range(0, number, per_update)]


def compare(mine: Run, truth: Run, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(mine.losses, truth.losses, rtol=tolerance)
    for name, weight in mine.weights.items():
        np.testing.assert_allclose(weight, truth.weights[name].reshape(-1), rtol=tolerance, atol=tolerance,
                                   err_msg=name)


def observe(made: StaleTrainer, kind: str, steps: Sequence[Sequence[Sequence[Any]]]) -> Run:
    """Some steps of this rank's pipeline. Collective over the trainer's world."""
    losses = []
    for batches in steps:
        mine = batches[made.rank]
        losses.append(made.step(mine if kind == "numpy" else as_torch(mine)).loss)
    return Run(losses, {name: np.asarray(w).copy() for name, w in made.parameters()})


def case(context: Any, name: str, ranks: int, numbers: Sequence[int], *, kind: str = "numpy", rule: str = "sgd",
         zero: int = 0, per_update: int | None = None, tolerance: float = 1e-12, **options: Any) -> StaleTrainer:
    """On one rank: steps of so many micro-batches equal the simulation. Collective over the context."""
    ours, theirs = RULES[rule]
    pipelines = context.size // ranks
    steps = [data(u, pipelines, number) for u, number in enumerate(numbers)]
    size = (per_update or ranks) if name == "pipedream-2bw" else 1
    net = other() if kind == "other" else twin()
    truth = simulate(net, stage_of(uniform(8, ranks)), delayed(name, ranks),
                     [grouped(batches, size) for batches in steps], theirs)
    how = {"per_update": per_update} if per_update else {}
    made = trainer(context, Pipeline(name, ranks, options=how), kind, optimizer=ours,
                   zero=hpctrain.Zero(zero, bucket_bytes=100), **options)
    compare(observe(made, kind, steps), truth, tolerance)
    return made
