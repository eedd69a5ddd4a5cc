"""A chain of NumPy layers as a Model.

Owns the names of parameters and the moment at which each gradient is complete. Must not know who reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.adapters.numpy.layers import Floats, Layer, Parameter
from hpctrain.contracts import Arrays
from hpctrain.plan.placement import Placement

__all__ = ["Network"]

LossFunction = Callable[[Any, Any], tuple[float, float, Any]]


class Network:
    """Layers applied in order, then a loss from `adapters.numpy.losses`. A micro-batch is (inputs, targets).

    Parameters are named `<layer index>.<name>`; one that several layers share goes by its first name. Lives in one
    process; all calls are local.
    """

    def __init__(self, layers: Sequence[Layer], loss: LossFunction, arrays: Arrays) -> None:
        self.arrays = arrays
        self._layers = tuple(layers)
        self._loss = loss
        self._names: dict[Parameter, list[str]] = {}
        for i, layer in enumerate(self._layers):
            for name, parameter in layer.parameters.items():
                self._names.setdefault(parameter, []).append(f"{i}.{name}")
        self._parameters = {names[0]: parameter for parameter, names in self._names.items()}
        self.placements = tuple(
            Placement(name, parameter.value.shape, str(parameter.value.dtype), frozen=parameter.frozen,
                      aliases=tuple(self._names[parameter][1:]))
            for name, parameter in self._parameters.items()
        )
        self._completed_by = self._first_users()

    def _first_users(self) -> list[list[str]]:
        """For each layer the parameters that no earlier layer uses: complete once its backward is done."""
        first: dict[Parameter, int] = {}
        for i, layer in enumerate(self._layers):
            for parameter in layer.parameters.values():
                first.setdefault(parameter, i)
        return [[name for name, p in self._parameters.items() if first[p] == i and not p.frozen]
                for i in range(len(self._layers))]

    def parameter(self, name: str) -> Floats:
        """The parameter's values."""
        return self._parameters[name].value

    def bind(self, name: str, parameter: Floats, gradient: Floats | None) -> None:
        """Moves the parameter and its gradient into the flat views."""
        held = self._parameters[name]
        view = parameter.reshape(held.value.shape)
        view[...] = held.value
        held.value = view
        held.gradient = None if gradient is None else gradient.reshape(view.shape)

    def buffers(self) -> Mapping[str, Any]:
        """None: these layers keep no statistics."""
        return {}

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Computes the loss of (inputs, targets); the stash is what each layer kept and the loss's gradient."""
        x, targets = micro_batch
        kept = []
        for layer in self._layers:
            x, keep = layer.forward(x)
            kept.append(keep)
        loss_sum, weight, gradient = self._loss(x, targets)
        return (loss_sum, weight), (kept, gradient) if training else None

    def backward(self, stash: Any, output_grads: Any, ready: Callable[[str], None]) -> Any:
        """Walks the layers backwards, reporting a parameter once the first layer that uses it is done."""
        kept, gradient = stash
        for layer, keep, completed in zip(reversed(self._layers), reversed(kept), reversed(self._completed_by),
                                          strict=True):
            gradient = layer.backward(keep, gradient)
            for name in completed:
                ready(name)
        return gradient

    def predict(self, inputs: Any) -> Any:
        """The outputs of the last layer."""
        for layer in self._layers:
            inputs, _ = layer.forward(inputs)
        return np.asarray(inputs)

    def rank_state(self) -> dict[str, bytes]:
        """None: these layers draw no random numbers."""
        return {}

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Nothing to restore."""
