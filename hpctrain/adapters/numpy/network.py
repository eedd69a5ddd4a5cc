"""A chain of NumPy layers as a Model, or as the Model of one pipeline stage.

Owns the names of parameters, the moment at which each gradient is complete, and the layers as units of memory. Must not
know who reduces gradients or lends memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpctrain.adapters.numpy.layers import Floats, Layer, Parameter
from hpctrain.contracts import Arrays, Replicated
from hpctrain.plan.placement import Placement

__all__ = ["Network"]

LossFunction = Callable[[Any, Any], tuple[float, float, Any]]


class Network:
    """Layers applied in order, then a loss from `adapters.numpy.losses`. A micro-batch is (inputs, targets).

    Parameters are named `<layer index>.<name>`; one that several layers share goes by its first name. Lives in one
    process; all calls are local.

    With `part` it is a stage of a pipeline: the layers from part[0] to part[1], named by their place in all of them.
    The first stage takes the micro-batch's inputs; the last one alone has a loss.
    """

    splits = False  # every forward leaves what either kind of backward needs
    replicated: Replicated = False  # these layers know no tensor group

    def __init__(self, layers: Sequence[Layer], loss: LossFunction | None, arrays: Arrays,
                 part: tuple[int, int] | None = None) -> None:
        self.arrays = arrays
        start, stop = part or (0, len(layers))
        self._layers = tuple(layers[start:stop])
        self._loss = loss
        names: dict[Parameter, list[str]] = {}
        for i, layer in enumerate(layers):
            for name, parameter in layer.parameters.items():
                names.setdefault(parameter, []).append(f"{i}.{name}")
        mine = {parameter for layer in self._layers for parameter in layer.parameters.values()}
        self._parameters = {names[parameter][0]: parameter for parameter in names if parameter in mine}
        self.placements = tuple(
            Placement(name, parameter.value.shape, str(parameter.value.dtype), frozen=parameter.frozen,
                      aliases=tuple(names[parameter][1:]))
            for name, parameter in self._parameters.items()
        )
        first = self._first_users()
        self._completed_by = [[name for name in names if not self._parameters[name].frozen] for names in first]
        self.units = tuple(tuple(names) for names in first if names)
        unit_of = {self._parameters[name]: u for u, names in enumerate(self.units) for name in names}
        self._units_of = [sorted({unit_of[p] for p in layer.parameters.values()}) for layer in self._layers]
        self._before: Callable[[int], None] = _ignore
        self._after: Callable[[int], None] = _ignore

    def _first_users(self) -> list[list[str]]:
        """For each layer the parameters that no earlier layer uses: complete once its backward is done."""
        first: dict[Parameter, int] = {}
        for i, layer in enumerate(self._layers):
            for parameter in layer.parameters.values():
                first.setdefault(parameter, i)
        return [[name for name, p in self._parameters.items() if first[p] == i] for i in range(len(self._layers))]

    def parameter(self, name: str) -> Floats:
        """The parameter's values."""
        return self._parameters[name].value

    def bind(self, name: str, parameter: Floats) -> None:
        """Moves the parameter into the flat view."""
        held = self._parameters[name]
        view = parameter.reshape(held.shape)
        view[...] = held.value
        held.value = view

    def move(self, name: str, parameter: Floats) -> None:
        """The parameter is the flat view."""
        held = self._parameters[name]
        held.value = parameter.reshape(held.shape)

    def check(self) -> None:
        """Nothing moves these parameters but the engine."""

    def watch(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """Each layer tells of the units that its parameters are in: two where it shares one with an earlier layer."""
        self._before, self._after = before, after

    def open(self, unit: int) -> list[Floats]:
        """Fresh memory for the unit's parameters."""
        return [self._parameters[name].open().reshape(-1) for name in self.units[unit]]

    def close(self, unit: int) -> None:
        """Drops the unit's memory."""
        for name in self.units[unit]:
            self._parameters[name].close()

    @contextmanager
    def _opened(self, index: int) -> Iterator[Layer]:
        """Layer `index`, with its parameters there to be read."""
        for unit in self._units_of[index]:
            self._before(unit)
        yield self._layers[index]
        for unit in self._units_of[index]:
            self._after(unit)

    def buffers(self) -> Mapping[str, Any]:
        """None: these layers keep no statistics."""
        return {}

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Runs the layers on `inputs`, or the micro-batch's own; computes the loss where there is one.

        The stash is what each layer kept, and the loss's gradient.
        """
        x = micro_batch[0] if inputs is None else inputs
        kept = []
        for i in range(len(self._layers)):
            with self._opened(i) as layer:
                x, keep = layer.forward(x)
            kept.append(keep)
        if self._loss is None:
            return x, (kept, None) if training else None
        loss_sum, weight, gradient = self._loss(x, micro_batch[1])
        return (loss_sum, weight), (kept, gradient) if training else None

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Any], None], scale: float = 1.0) -> Any:
        """Walks the layers backwards, delivering a gradient once the first layer that uses its parameter is done."""
        kept, gradient = stash[0], _scaled(stash[1], output_grads, scale)
        for i in reversed(range(len(self._layers))):
            with self._opened(i) as layer:
                layer.backward_weight(kept[i], gradient)
                gradient = layer.backward_input(kept[i], gradient)
            self._deliver(i, deliver)
        return gradient

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        """Walks the layers backwards; the rest is what those with parameters kept, and the gradients they saw."""
        kept, gradient = stash[0], _scaled(stash[1], output_grads, scale)
        rest: list[Any] = [None] * len(self._layers)
        for i in reversed(range(len(self._layers))):
            with self._opened(i) as layer:
                if layer.parameters:
                    rest[i] = kept[i], gradient
                gradient = layer.backward_input(kept[i], gradient)
        return gradient, rest

    def backward_weight(self, rest: Any, deliver: Callable[[str, Any], None]) -> None:
        """Walks the layers with parameters backwards. Their values are not read."""
        for i in reversed(range(len(self._layers))):
            if rest[i] is not None:
                self._layers[i].backward_weight(*rest[i])
            self._deliver(i, deliver)

    def _deliver(self, index: int, deliver: Callable[[str, Any], None]) -> None:
        for name in self._completed_by[index]:
            deliver(name, self._parameters[name].take())

    def predict(self, inputs: Any) -> Any:
        """The outputs of the last layer."""
        for i in range(len(self._layers)):
            with self._opened(i) as layer:
                inputs, _ = layer.forward(inputs)
        return np.asarray(inputs)

    def rank_state(self) -> dict[str, bytes]:
        """None: these layers draw no random numbers."""
        return {}

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Nothing to restore."""


def _scaled(own: Any, from_next: Any, scale: float) -> Any:
    """The gradient that a backward begins with: of the stage's own loss, or what the next stage gave."""
    gradient = from_next if own is None else own
    return gradient if scale == 1.0 else gradient * gradient.dtype.type(scale)


def _ignore(unit: int) -> None:
    """All memory is there all the time."""
