"""One pipeline stage of a torch model as a Model.

    forward    inputs -> leaves -> layers -> outputs, detached      the stash has the leaves and the outputs' graph
    backward   gradients of outputs -> autograd -> gradients of leaves; of parameters: delivered

Each call is local. Owns the stash. Must not know schedules, messages or other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpctrain.adapters.torch.cut import shared_with, stage_layers, tree
from hpctrain.adapters.torch.later import Later, LaterGradients, weight_gradients
from hpctrain.adapters.torch.layers import Chain, trains
from hpctrain.adapters.torch.module import TorchModel
from hpctrain.adapters.torch.nests import map_tensors, pairs
from hpctrain.contracts import Arrays

__all__ = ["Ends", "TorchStage"]

Deliver = Callable[[str, torch.Tensor], None]


class Ends(NamedTuple):
    """What the first and the last stage do with a micro-batch."""

    inputs: Callable[[Any], Any]  # inputs(micro_batch) -> what the first layer is called with
    loss: Callable[[Any, Any], tuple[torch.Tensor, float]]  # loss(what the last layer gave, micro_batch)


@dataclass
class _Stash:
    """What a forward leaves for its backward."""

    leaves: Any  # the nest of inputs; tensors that may have a gradient are leaves of the graph
    outputs: Any  # the nest of outputs with their graph, or the loss
    splits: bool  # whether the graph is made for a backward in two parts


@dataclass
class _Rest:
    """What the first part of a backward leaves for the second."""

    kept: list[Later]
    finished: dict[str, torch.Tensor]


class TorchStage(TorchModel):
    """Layers of a chain. Made on the rank that runs it; all calls are local.

    Inputs and outputs are nests of dict, list, tuple, plain values and tensors; outputs are contiguous. Floating-point
    inputs are taken to need a gradient where an earlier stage is trained; one that gets none has None in its place.
    Gradients of outputs that have no graph are not looked at. Stash and rest may hold the tensors given to the calls.
    `shared` are the parameters that other stages have, too, with all of their stages: the sum over these stages is the
    gradient. `own_autograd`: see `later.LaterGradients`.
    """

    def __init__(self, whole: Chain, bounds: Sequence[int], stage: int, ends: Ends, arrays: Arrays,
                 no_decay: Sequence[str] = (), *, own_autograd: bool = False) -> None:
        self.layers = stage_layers(whole, bounds, stage)
        self.shared = shared_with(whole, bounds, stage)
        self.is_first, self.is_last = stage == 0, stage == len(bounds) - 2
        self._ends = ends
        self._leaf = _leaf if trains(whole.layers[:bounds[stage]]) else torch.Tensor.detach
        super().__init__(tree(self.layers), self._no_loss, arrays, no_decay, (), whole.names)
        self._later = LaterGradients({n: p for n, p in self._parameters.items() if p.requires_grad},
                                     own_autograd=own_autograd)

    @staticmethod
    def _no_loss(module: torch.nn.Module, micro_batch: Any) -> tuple[torch.Tensor, float]:
        raise AssertionError("a stage has its own forward")

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Runs the layers; gives (outputs, stash), the last stage (loss_sum, weight) as numbers."""
        try:
            if not training:
                return self._evaluated_stage(micro_batch, inputs), None
            self.check()
            leaves = self._ends.inputs(micro_batch) if self.is_first else map_tensors(self._leaf, inputs)
            with self._later.watching() if self.splits else nullcontext():
                outputs, weight = self._run(micro_batch, leaves)
            stash = _Stash(None if self.is_first else leaves, outputs, self.splits)
            if self.is_last:
                return (float(outputs.detach()), weight), stash
            return map_tensors(_handed_on, outputs), stash
        finally:
            if self._calls is not None:
                self._calls.forward_ends()

    def _evaluated_stage(self, micro_batch: Any, inputs: Any) -> Any:
        was_training = {part: part.training for part in self.module.modules()}
        self.module.eval()
        try:
            with torch.no_grad():
                outputs, weight = self._run(micro_batch, self._ends.inputs(micro_batch) if self.is_first else inputs)
        finally:
            for part, training in was_training.items():
                part.training = training
        return (float(outputs), weight) if self.is_last else map_tensors(_handed_on, outputs)

    def _run(self, micro_batch: Any, value: Any) -> tuple[Any, float]:
        """(outputs, 0.0); of the last stage (loss_sum, weight)."""
        for layer in self.layers:
            value = layer.run(*layer.parts.values(), value)
        if not self.is_last:
            return value, 0.0
        loss_sum, weight = self._checked(self._ends.loss(value, micro_batch))
        return loss_sum, float(weight)

    def backward(self, stash: _Stash, output_grads: Any, deliver: Deliver, scale: float = 1.0) -> Any:
        """Runs autograd, delivering each parameter's gradient as it completes; gives the inputs' gradients.

        `scale` is the last stage's: gradients of outputs have it already.
        """
        if stash.splits:
            input_grads, rest = self.backward_input(stash, output_grads, scale)
            self.backward_weight(rest, deliver)
            return input_grads
        return self._autograd(stash, *self._roots(stash, output_grads, scale), deliver)

    def backward_input(self, stash: _Stash, output_grads: Any, scale: float = 1.0) -> tuple[Any, _Rest]:
        """The first part: gives the inputs' gradients, and what `backward_weight` needs. All of it without `splits`."""
        finished: dict[str, torch.Tensor] = {}
        roots, grads = self._roots(stash, output_grads, scale)
        if not stash.splits:
            return self._autograd(stash, roots, grads, finished.__setitem__), _Rest([], finished)
        with self._later.keeping(roots) as kept:
            return self._autograd(stash, roots, grads, finished.__setitem__), _Rest(kept, finished)

    def backward_weight(self, rest: _Rest, deliver: Deliver) -> None:
        """The second part: delivers the gradient of each parameter that the backward reached."""
        for name, gradient in weight_gradients(rest.kept, rest.finished):
            deliver(name, gradient)

    def _roots(self, stash: _Stash, output_grads: Any, scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where autograd begins, and with which gradients. The stash gives up its outputs."""
        outputs, stash.outputs = stash.outputs, None
        if self.is_last:
            return ([outputs], [torch.full_like(outputs, scale)]) if outputs.requires_grad else ([], [])
        found = [(t, g) for t, g in pairs(outputs, output_grads) if t.requires_grad and g is not None]
        return [t for t, _ in found], [g for _, g in found]

    def _autograd(self, stash: _Stash, roots: list[torch.Tensor], grads: list[torch.Tensor], deliver: Deliver) -> Any:
        self._deliver = deliver
        try:
            if roots:
                torch.autograd.backward(roots, grads)
        finally:
            self._deliver = None
            if self._calls is not None:
                self._calls.backward_ends()
        return map_tensors(_taken_gradient, stash.leaves, plain=False)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _handed_on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _taken_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else gradient.contiguous()
