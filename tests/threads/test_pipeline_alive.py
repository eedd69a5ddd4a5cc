"""The bytes of activations that are really alive on each rank are those of the plan, and none are left afterwards."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest
import torch

import hpctrain.numpy as n
import hpctrain.torch
from hpctrain.plan.pipeline.stash import peak_bytes
from hpctrain.plan.schedule import BackwardInput
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer

WIDTH, ROWS = 3, 2


class Alive:
    """Arrays of one rank, as long as anybody holds them."""

    def __init__(self) -> None:
        self._signs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.most = 0

    def add(self, *things: Any) -> int:
        """Gives the bytes of these things, each of them an array or a `Saved`."""
        total = 0
        for thing in things:
            root = thing
            while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
                root = root.base  # whoever has a view of it has it
            self._signs[id(root)] = weakref.ref(root), thing.nbytes
            total += thing.nbytes
        self.look()
        return total

    def look(self) -> int:
        """Bytes that are alive now."""
        self._signs = {key: (sign, size) for key, (sign, size) in self._signs.items() if sign() is not None}
        now = sum(size for _, size in self._signs.values())
        self.most = max(self.most, now)
        return now


class Saved:
    """What autograd saves of a forward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.nbytes = tensor.detach(), tensor.nbytes


def arrays_in(nest: Any) -> Iterator[Any]:
    if isinstance(nest, np.ndarray | torch.Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from arrays_in(part)
    elif isinstance(nest, dict):
        yield from arrays_in(list(nest.values()))
    elif hasattr(nest, "__dict__"):  # stash and rest of a torch stage
        yield from arrays_in(list(vars(nest).values()))


class Watched:
    """A stage that knows what it keeps (`kept`) and what goes through it (`passing`)."""

    def __init__(self, model: Any, kept: Alive, passing: Alive) -> None:
        self._model, self._kept, self._passing = model, kept, passing
        self.activation = self.weight_part = 0  # bytes of one micro-batch
        self._saved: list[Saved] = []
        self._given: set[int] = set()  # the data, which is the user's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, inputs: Any = None, *, training: bool = True) -> Any:
        self._kept.look()
        self._passing.add(*arrays_in(inputs))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda s: s.tensor if isinstance(s, Saved) else s):
            outputs, stash = self._model.forward(batch, inputs, training=training)
        self._passing.add(*arrays_in(outputs))
        saved, self._saved = self._saved, []
        if training:
            self._given.add(id(batch[0]))
            own = [a for a in arrays_in(stash) if id(a) not in self._given and getattr(a, "grad_fn", None) is None]
            self.activation = self._kept.add(*saved, *own)
        return outputs, stash

    def _pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or tensor.shape == (WIDTH, WIDTH):
            return tensor
        self._saved.append(Saved(tensor))
        return self._saved[-1]

    def backward(self, stash: Any, grads: Any, *rest: Any) -> Any:
        self._kept.look()
        self._passing.add(*arrays_in(grads))
        gradient = self._model.backward(stash, grads, *rest)
        self._passing.add(*arrays_in(gradient))
        return gradient

    def backward_input(self, stash: Any, grads: Any, *options: Any) -> Any:
        self._kept.look()
        self._passing.add(*arrays_in(grads))
        gradient, rest = self._model.backward_input(stash, grads, *options)
        self._passing.add(*arrays_in(gradient))
        most = self._kept.most
        self.weight_part = self._kept.add(*(a for a in arrays_in(rest) if id(a) not in self._given))
        self._kept.most = most  # the stash is still there, until the caller lets go of it
        return gradient, rest

    def backward_weight(self, *args: Any) -> None:
        self._kept.look()
        self._model.backward_weight(*args)


def numpy_stage(stages: int, stage: int) -> Any:
    generator = np.random.default_rng(1)
    layers = [n.Linear(n.Parameter(generator.normal(size=(WIDTH, WIDTH)))) for _ in range(2 * stages)]
    return n.stage(layers, n.squared_error, range(0, 2 * stages + 1, 2), stage)


def torch_stage(stages: int, stage: int) -> Any:
    layers = [layer for _ in range(stages) for layer in (
        torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64))]
    return hpctrain.torch.stage(hpctrain.torch.layers(layers), range(0, 3 * stages + 1, 3), stage,
                                lambda y, batch: ((y - batch[1]).square().sum(), ROWS))


def data(make: Any, number: int) -> list[Any]:
    generator = np.random.default_rng(2)
    found = generator.normal(size=(number, 2, ROWS, WIDTH))
    return [tuple(torch.tensor(a) if make is torch_stage else a.copy() for a in pair) for pair in found]


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("make", [numpy_stage, torch_stage])
@pytest.mark.parametrize(("ranks", "number"), [(1, 3), (2, 5), (3, 7)])
def test_as_many_bytes_as_planned(make: Any, name: str, ranks: int, number: int) -> None:
    pipeline = Pipeline(name)
    plan = pipeline.plan(ranks, number)
    found: dict[tuple[int, int], Watched] = {}

    def run(context: Any) -> int:
        kept, passing = Alive(), Alive()

        def stage(s: int) -> Watched:
            found[context.rank, s] = Watched(make(plan.depth, s), kept, passing)
            return found[context.rank, s]

        trainer = PipelineTrainer(context, stage, pipeline, **pp.options())
        batch = data(make, number)
        for _ in range(2):
            trainer.step(batch)
            assert (kept.look(), passing.look()) == (0, 0)
        most = kept.most
        trainer.evaluate(batch)
        assert (kept.look(), passing.look()) == (0, 0)
        return most

    most = pp.on_threads(ranks, run)
    stages = [found[place, s % plan.depth] for s, place in enumerate(plan.places)]
    activation, weight_part = [s.activation for s in stages], [s.weight_part for s in stages]
    assert min(activation) > 0 and (max(weight_part) > 0) == any(
        isinstance(action, BackwardInput) for order in plan.orders for action in order)
    assert tuple(most) == peak_bytes(plan, activation, weight_part)


def test_the_data_is_let_go_of() -> None:
    def run(context: Any) -> None:
        trainer = PipelineTrainer(context, lambda s: numpy_stage(2, s), Pipeline("1f1b"), **pp.options())
        for use in (trainer.step, trainer.evaluate):
            batch = data(numpy_stage, 3)
            signs = [weakref.ref(array) for pair in batch for array in pair]
            use(batch)
            del batch
            assert not any(sign() is not None for sign in signs)

    pp.on_threads(2, run)


class Slow(Watched):
    """Takes its time."""

    def forward(self, *args: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return super().forward(*args, **options)


@pytest.mark.parametrize(("name", "slow"), [("1f1b", 2), ("1f1b", 1), ("interleaved", 5), ("zb-v", 3)])
def test_a_fast_stage_does_not_pile_up_what_a_slow_one_has_not_taken(name: str, slow: int) -> None:
    ranks, number = 3, 40
    stages = Pipeline(name).plan(ranks, 1).depth

    def run(context: Any) -> float:
        passing = Alive()

        def stage(s: int) -> Watched:
            return (Slow if s == slow else Watched)(numpy_stage(stages, s), Alive(), passing)

        trainer = PipelineTrainer(context, stage, Pipeline(name), **pp.options())
        trainer.evaluate(data(numpy_stage, number))
        return passing.most / np.empty((ROWS, WIDTH)).nbytes

    assert max(pp.on_threads(ranks, run)) <= ranks * -(-stages // ranks) + 2
