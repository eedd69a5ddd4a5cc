"""Stages of torch: run one after the other by hand, or by a trainer, and what they are compared with; nests between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import parity
import pipeline_parity as pp
import torch
from torch import Tensor, nn

import hpctrain.torch
from hpctrain.adapters.torch.stage import TorchStage
from hpctrain.models import gpt
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.plan.pipeline.stash import stage_peaks
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import single

VOCAB, WIDTH = 7, 5


def whole(module: torch.nn.Module, loss: Callable[[Any, Any], Any], batches: Sequence[Any],
          scale: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: the loss of each micro-batch, and the sum of all gradients by name. `loss(outputs, micro_batch)`."""
    module = copy.deepcopy(module)
    losses = []
    for batch in batches:
        loss_sum = loss(module(batch[0]), batch)[0]
        losses.append(float(loss_sum.detach()))
        if loss_sum.requires_grad:
            (loss_sum * scale).backward()
    return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def bind(stages: Sequence[TorchStage]) -> None:
    """Gives each stage memory for its parameters, as a trainer does."""
    for stage in stages:
        for placement in stage.placements:
            dtype = getattr(torch, placement.dtype)
            stage.bind(placement.name, torch.empty(placement.count, dtype=dtype))


def sent(nest: Any) -> Any:
    """What arrives at another rank."""
    if isinstance(nest, torch.Tensor):
        assert nest.is_contiguous() and not nest.requires_grad
        return nest.clone()
    if isinstance(nest, dict):
        return {key: sent(value) for key, value in nest.items()}
    return type(nest)(map(sent, nest)) if isinstance(nest, list | tuple) else nest


def by_hand(stages: Sequence[TorchStage], batches: Sequence[Any], *, split: bool,
            splits: bool | None = None, scale: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As `whole`: all forwards, then all backwards, in one part each, or in two with the second parts at the end.

    `splits` is what the stages are told, if not the truth.
    """
    gradients: dict[str, torch.Tensor] = {}

    def deliver(name: str, gradient: torch.Tensor) -> None:
        gradients[name] = gradients[name] + gradient if name in gradients else gradient.clone()
        gradient.fill_(float("nan"))  # the callee may write

    stashes: list[list[Any]] = []
    losses, rests = [], []
    for batch in batches:
        value: Any = None
        stashes.append([])
        for stage in stages:
            stage.splits = split if splits is None else splits
            value, stash = stage.forward(batch, sent(value))
            stashes[-1].append(stash)
        losses.append(value[0])
    for of_batch in stashes:
        grads: Any = None
        for stage in reversed(stages):
            if split:
                grads, rest = stage.backward_input(of_batch.pop(), sent(grads), scale)
                rests.append((stage, rest))
            else:
                grads = stage.backward(of_batch.pop(), sent(grads), deliver, scale)
            if stage.is_first:
                assert grads is None
    for stage, rest in rests:
        stage.backward_weight(rest, deliver)
    return losses, gradients


def assert_equal(found: Any, truth: Any, tolerance: float = 1e-12) -> None:
    """Losses and gradients are the same, and of the same parameters; None and zeros are the same."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(truth[0]), rtol=tolerance, atol=tolerance)
    for name in {*found[1], *truth[1]}:
        if name not in truth[1]:
            assert not found[1][name].any(), name
            continue
        assert name in found[1], name
        scale = max(1.0, float(truth[1][name].abs().max())) if truth[1][name].numel() else 1.0
        torch.testing.assert_close(found[1][name], truth[1][name], rtol=tolerance, atol=tolerance * scale, msg=name)


# By a trainer --------------------------------------------------------------------------------------------------------


def first_entry(batch: Any) -> Any:
    return batch[0]


@dataclass(frozen=True)
class Task:
    """A module, the loss of its outputs, what its first layer takes, and its steps (None: it is a Sequential)."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], tuple[Tensor, float]]
    inputs: Callable[[Any], Any] = first_entry
    steps: Callable[[Any], Any] | None = None

    def whole(self, **changed: Any) -> Trainer:
        """A trainer of the whole model in one process."""
        model = hpctrain.torch.adapt(self.make(), lambda module, b: self.loss(module(self.inputs(b)), b))
        return Trainer(parity.context_of(single()), model, **pp.options(**changed))

    def pipelined(self, context: Any, pipeline: Pipeline, bounds: Sequence[int] | None = None,
                  **changed: Any) -> PipelineTrainer:
        """A trainer of the model in stages."""
        module = self.make()
        chain = hpctrain.torch.layers(module, self.steps(module) if self.steps else None)
        cut = bounds or pipeline.first_plan(pipeline.num_ranks(context.size)).depth
        return PipelineTrainer(context, lambda s: hpctrain.torch.stage(chain, cut, s, self.loss, inputs=self.inputs),
                               pipeline, **pp.options(**changed))

    def check(self, size: int, pipeline: Pipeline, batches: Any, truth: pp.Seen, **how: Any) -> None:
        """So many ranks on threads are equal to the truth, and hold what is planned."""

        def run(context: Any) -> None:
            trainer = self.pipelined(context, pipeline, **how)
            shared = pp.share(batches, trainer)
            pp.compare(pp.observe(trainer, shared), truth)
            if shared[-1]:
                planned = stage_peaks(trainer.plan(len(shared[-1])))
                assert trainer.peaks == {stage: planned[stage] for stage in trainer.peaks}

        pp.on_threads(size, run)


def small_gpt() -> Task:
    """A GPT with tied ends."""
    shape = GPTShape(layers=4, width=8, heads=2, context=12, vocabulary=11, tied=True)
    return Task(lambda: gpt.GPT(shape, dtype=torch.float64), gpt.loss_of_logits, gpt.tokens_of, gpt.GPT.steps)


def plain() -> Task:
    """Five small layers with single tensors between them; the embedding's table is the last layer's weight, too."""

    def make() -> nn.Module:
        made = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
                             nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCAB)).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in made.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
        made[4].weight = made[0].weight
        return made

    return Task(make, lambda y, batch: (nn.functional.cross_entropy(y, batch[1], reduction="sum"), len(batch[1])))


# Nests between layers ------------------------------------------------------------------------------------------------


class Open(nn.Module):
    """(tokens, targets, number of the micro-batch) -> a nest of everything that a nest may have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, given: Any) -> Any:
        tokens, targets, number = given
        return {"h": self.table(tokens), "mask": tokens > 2, "pos": torch.arange(len(tokens)), "targets": targets,
                "extra": (None, 3, 2.5, "tag", [torch.full((2,), 0.5).double()]), "number": number,
                "no use": 2 * self.table(tokens)}


class Step(nn.Module):
    """Adds a part of the nest where it is missing, else uses it and leaves it out; odd micro-batches have one more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False), nn.LayerNorm(WIDTH)

    def forward(self, nest: Any) -> Any:
        as_it_was(nest)
        h = nest["h"] + self.down(torch.tanh(self.up(self.norm(nest["h"]))))
        h = torch.where(nest["mask"][:, None], h, h / nest["extra"][2]) * (1 + nest["targets"][:, None] / 10)
        nest = {**nest, "h": h}
        if "more" in nest:
            nest["h"] = h + nest.pop("more")[0] + nest["pos"][:, None] / 10
        else:
            nest["more"] = [h.mean(0), nest["number"]]
        if nest["number"] % 2:
            nest["odd"] = nest["extra"][4]
        return nest


class Close(nn.Module):
    """A nest -> (logits, number)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, nest: Any) -> Any:
        as_it_was(nest)
        return self.head(nest["h"]), nest["number"]


def as_it_was(nest: Any) -> None:
    """The nest is as the first layer made it: types, order and numbers; and all of one micro-batch."""
    none, three, half, tag, (tensor,) = nest["extra"]
    assert none is None and type(three) is int and (three, half, tag) == (3, 2.5, "tag")
    assert type(nest["extra"]) is tuple and type(nest["extra"][4]) is list and tensor.tolist() == [0.5, 0.5]
    assert (nest["mask"].dtype, nest["pos"].dtype, nest["h"].dtype) == (torch.bool, torch.int64, torch.float64)
    assert nest["pos"].tolist() == list(range(len(nest["h"]))) and type(nest["number"]) is int
    assert list(nest)[:7] == ["h", "mask", "pos", "targets", "extra", "number", "no use"]
    assert "more" not in nest or nest["more"][1] == nest["number"]


def nests(frozen: Sequence[int] = (), tied: bool = True) -> Task:
    """Six layers with nests between them; the embedding's table is the last layer's weight, too."""

    def make() -> nn.Module:
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

    def loss(outputs: Any, batch: Any) -> tuple[Tensor, float]:
        logits, number = outputs
        assert number == batch[2] and len(logits) == len(batch[1])
        return nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])

    return Task(make, loss, inputs=lambda batch: batch)


def numbered(lengths: Sequence[int], update: int = 0) -> list[Any]:
    """Micro-batches of so many tokens for `nests`; each knows its number."""
    g = torch.Generator().manual_seed(update)
    return [(*(torch.randint(VOCAB, (length,), generator=g) for _ in range(2)), i) for i, length in enumerate(lengths)]
