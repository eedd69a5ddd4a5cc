"""A network in NumPy, whole in one process and cut into stages, and what both must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import parity

import hpctrain
import hpctrain.numpy as n
from hpctrain.plan.pipeline.partition import uniform
from hpctrain.plan.split import part
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads, single

VOCAB, WIDTH, LENGTH = 7, 4, 3
TOLERANCE = 1e-10
_TRUTHS: dict[Any, Seen] = {}


def layers(tied: bool = True, frozen: Sequence[int] = (), dtype: str = "float64") -> list[Any]:
    """Eight layers; the embedding's table is the last layer's weight, too. `frozen` are numbers of layers."""
    generator = np.random.default_rng(4)

    def parameter(layer: int, *shape: int) -> Any:
        return n.Parameter(generator.normal(size=shape, scale=0.6).astype(dtype), frozen=layer in frozen)

    table = parameter(0, VOCAB, WIDTH)
    last = table if tied else parameter(7, VOCAB, WIDTH)
    return [n.Embedding(table), n.Linear(parameter(1, 5, LENGTH * WIDTH), parameter(1, 5)), n.Tanh(),
            n.Linear(parameter(3, 5, 5), parameter(3, 5)), n.Gelu(), n.Linear(parameter(5, WIDTH, 5)), n.Tanh(),
            n.Linear(last)]


def global_batch(number: int, update: int = 0, rows: int = 3) -> list[Any]:
    """So many micro-batches, of 1 to `rows` rows each."""
    generator = np.random.default_rng([9, update])
    sizes = [1 + (i + update) % rows for i in range(number)]
    return [(generator.integers(VOCAB, size=(size, LENGTH)), generator.integers(VOCAB, size=size)) for size in sizes]


class Wrapping:
    """A stage whose outputs travel in a nest that changes with the number of the micro-batch.

    Micro-batches are those of `numbered`. Sees that what arrives is of the same one.
    """

    def __init__(self, model: Any, *, last: bool) -> None:
        self._model, self._last = model, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, inputs: Any = None, *, training: bool = True) -> Any:
        _, targets, number = batch
        x = None
        if inputs is not None:
            assert inputs["number"] == number and np.array_equal(inputs["targets"], targets)
            assert inputs["targets"].dtype == np.int64 and len(inputs["x"]) == len(targets)
            x = inputs["x"]
        outputs, stash = self._model.forward(batch, x, training=training)
        return outputs if self._last else self._wrapped(outputs, targets, number), (stash, tuple(inputs or ()))

    @staticmethod
    def _wrapped(x: Any, targets: Any, number: int) -> Any:
        nest = {"number": number, "x": x, "targets": targets}
        if number % 2:
            nest["mask"] = [targets > 2, None, ("tag", 2.5)]
        return nest if number % 3 else {"no use": np.ones(number + 1), **nest}

    def backward(self, stash: Any, grads: Any, *rest: Any) -> Any:
        kept, names = stash
        return {**dict.fromkeys(names), "x": self._model.backward(kept, grads and grads["x"], *rest)}

    def backward_input(self, stash: Any, grads: Any, *rest: Any) -> Any:
        kept, names = stash
        gradient, later = self._model.backward_input(kept, grads and grads["x"], *rest)
        return {**dict.fromkeys(names), "x": gradient}, later


def numbered(number: int, update: int = 0, rows: int = 3) -> list[Any]:
    """As `global_batch`, and each micro-batch has its number."""
    return [(*batch, i) for i, batch in enumerate(global_batch(number, update, rows))]


@dataclass
class Seen:
    """What is compared; gradients and weights by name, gradients of later updates with their number."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    evaluated: float


def observe(trainer: Trainer, batches: Sequence[Sequence[Any]]) -> Seen:
    """Some updates. Collective over the trainer's world."""
    losses, norms, gradients = [], [], {}
    for update, batch in enumerate(batches):
        result = trainer.step(batch)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        for name, gradient in trainer.gradients():
            gradients[f"{name} in update {update}" if update else name] = np.asarray(gradient).copy()
    weights = {name: np.asarray(w).copy() for name, w in trainer.parameters()}
    return Seen(losses, norms, gradients, weights, trainer.evaluate(batches[0]).loss)


def options(**changed: Any) -> dict[str, Any]:
    return {"optimizer": hpctrain.AdamW(lr=0.02, weight_decay=0.1), "clip_norm": 0.4,
            "zero": hpctrain.Zero(bucket_bytes=100), **changed}


def alone(batches: Sequence[Sequence[Any]], made: list[Any], **changed: Any) -> Seen:
    """The truth: one process, the whole network."""
    trainer = Trainer(parity.context_of(single()), n.network(made, n.cross_entropy), **options(**changed))
    return observe(trainer, batches)


def share(batches: Sequence[Sequence[Any]], trainer: PipelineTrainer) -> list[list[Any]]:
    """The micro-batches of this rank's pipeline; parts differ, and may be empty."""
    cuts = [part(len(batch), trainer.mesh["data"], trainer.rank) for batch in batches]
    return [list(batch[a:b]) for batch, (a, b) in zip(batches, cuts, strict=True)]


def pipelined(context: SimpleNamespace, pipeline: Pipeline, make: Any = layers, bounds: Sequence[int] | None = None,
              trace: bool = False, wrap: bool = False, **changed: Any) -> PipelineTrainer:
    """A trainer of the network in stages; `make()` gives all layers. `wrap`: with nests between stages."""
    made = make()
    stages = pipeline.first_plan(pipeline.num_ranks(context.size)).depth
    cut = bounds or uniform(len(made), stages)

    def stage(s: int) -> Any:
        model = n.stage(made, n.cross_entropy, cut, s)
        return Wrapping(model, last=s == stages - 1) if wrap else model

    return PipelineTrainer(context, stage, pipeline, trace=trace, **options(**changed))


def compare(mine: Seen, truth: Seen, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(mine.losses, truth.losses, rtol=tolerance)
    np.testing.assert_allclose(mine.norms, truth.norms, rtol=tolerance)
    np.testing.assert_allclose(mine.evaluated, truth.evaluated, rtol=tolerance)
    for kind in ("gradients", "weights"):
        for name, value in getattr(mine, kind).items():
            np.testing.assert_allclose(value, getattr(truth, kind)[name], rtol=tolerance, atol=tolerance, err_msg=name)


def case(context: Any, truth: Seen, pipeline: Pipeline, batches: Sequence[Sequence[Any]], *,
         tolerance: float = TOLERANCE, **how: Any) -> Seen:
    """On one rank: equal to the truth. Collective over the context."""
    trainer = pipelined(context, pipeline, **how)
    seen = observe(trainer, share(batches, trainer))
    compare(seen, truth, tolerance)
    held = {name for names in context.world.exchange(sorted(seen.weights)) for name in names}
    assert held == set(truth.weights)
    return seen


def truth(number: int, updates: int = 2, **how: Any) -> Seen:
    """One process on so many micro-batches an update; `how` is of the layers. Computed once."""
    key = number, updates, tuple(sorted(how.items()))
    if key not in _TRUTHS:
        _TRUTHS[key] = alone([global_batch(number, u) for u in range(updates)], layers(**how))
    return _TRUTHS[key]


def check(num_ranks: int, pipeline: Pipeline, number: int, updates: int = 2, **how: Any) -> list[Seen]:
    """So many ranks on threads are equal to the truth; `how` is of the trainer."""
    expected = truth(number, updates)
    batches = [global_batch(number, u) for u in range(updates)]
    return on_threads(num_ranks, lambda context: case(context, expected, pipeline, batches, **how))


def on_threads(num_ranks: int, function: Any) -> list[Any]:
    return run_threads(num_ranks, lambda transport: function(parity.context_of(transport)))
