"""Layers in NumPy: forward keeps what backward needs, backward adds to the parameters' gradients of that pass.

Shapes: a batch of `rows` vectors is (rows, width). Parameters are shared by giving two layers the same `Parameter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any, Protocol

import numpy as np

from hpctrain.errors import UnsupportedError

__all__ = ["Embedding", "Gelu", "Layer", "Linear", "Parameter", "Tanh"]

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Parameter:
    """A tensor that is trained, or frozen. `gradient` is that of the backward pass under way, None before it."""

    def __init__(self, value: Floats, frozen: bool = False) -> None:
        self.value = value
        self.frozen = frozen
        self.gradient: Floats | None = None

    @property
    def value(self) -> Floats:
        """The values. Raises UnsupportedError while they have no memory."""
        if self._value is None:
            raise UnsupportedError(f"the values of a parameter of shape {self.shape} are spread over the ranks "
                                   "(zero.stage = 3); outside of forward and backward read Trainer.parameters()")
        return self._value

    @value.setter
    def value(self, value: Floats) -> None:
        self._value: Floats | None = value
        self.shape, self.dtype = value.shape, value.dtype

    def open(self) -> Floats:
        """Memory of its own, values undefined."""
        self.value = np.empty(self.shape, self.dtype)
        return self.value

    def close(self) -> None:
        """Lets go of the memory."""
        self._value = None

    def add(self, gradient: Floats) -> None:
        """Adds an array that is nobody else's to the gradient, unless frozen."""
        if self.frozen:
            return
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient += gradient

    def take(self) -> Floats:
        """The gradient of this pass, which ends with it."""
        assert self.gradient is not None, "every layer adds to its parameters"
        gradient, self.gradient = self.gradient, None
        return gradient


class Layer(Protocol):
    """One step of a network."""

    parameters: dict[str, Parameter]

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Returns (output, what backward needs)."""

    def backward_input(self, kept: Any, gradient: Any) -> Any:
        """Returns the input's gradient."""

    def backward_weight(self, kept: Any, gradient: Any) -> None:
        """Adds to the parameters' gradients."""


@dataclass
class Linear:
    """y = x W^T + b with W of shape (outputs, inputs), as torch.nn.Linear stores it."""

    weight: Parameter
    bias: Parameter | None = None
    parameters: dict[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = {"weight": self.weight} | ({"bias": self.bias} if self.bias else {})

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """(rows, inputs) -> (rows, outputs)."""
        y = x @ self.weight.value.T
        return (y if self.bias is None else y + self.bias.value), x

    def backward_input(self, kept: Floats, gradient: Floats) -> Floats:
        """(rows, outputs) -> (rows, inputs)."""
        return gradient @ self.weight.value

    def backward_weight(self, kept: Floats, gradient: Floats) -> None:
        """Adds to weight and bias."""
        self.weight.add(gradient.T @ kept)
        if self.bias is not None:
            self.bias.add(gradient.sum(axis=0))


@dataclass
class Embedding:
    """Looks up the tokens of a row and joins their vectors: (rows, positions) integers -> (rows, positions * width)."""

    table: Parameter
    parameters: dict[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = {"weight": self.table}

    def forward(self, x: Any) -> tuple[Floats, Any]:
        """Integers of any shape (rows, positions)."""
        return self.table.value[x].reshape(len(x), -1), x

    def backward_input(self, kept: Any, gradient: Floats) -> None:
        """Integers have no gradient."""

    def backward_weight(self, kept: Any, gradient: Floats) -> None:
        """Adds each row's gradient to the tokens it used."""
        if self.table.frozen:
            return
        if self.table.gradient is None:
            self.table.gradient = np.zeros(self.table.shape, gradient.dtype)
        np.add.at(self.table.gradient, kept.reshape(-1), gradient.reshape(kept.size, -1))


class _Elementwise:
    """A function applied to each element; keeps its input."""

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}

    @staticmethod
    def function(x: Floats) -> Floats:
        """The function, element by element."""
        raise AssertionError("given by the subclass")

    @staticmethod
    def derivative(x: Floats) -> Floats:
        """Its derivative at x."""
        raise AssertionError("given by the subclass")

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """Same shape."""
        return self.function(x), x

    def backward_input(self, kept: Floats, gradient: Floats) -> Floats:
        """Same shape."""
        return gradient * self.derivative(kept)

    def backward_weight(self, kept: Floats, gradient: Floats) -> None:
        """No parameters."""


class Tanh(_Elementwise):
    """Hyperbolic tangent."""

    @staticmethod
    def function(x: Floats) -> Floats:
        """tanh."""
        return np.tanh(x)

    @staticmethod
    def derivative(x: Floats) -> Floats:
        """1 - tanh^2."""
        return 1 - np.tanh(x) ** 2


class Gelu(_Elementwise):
    """GELU in its tanh form (arXiv 1606.08415, section 2)."""

    @staticmethod
    def function(x: Floats) -> Floats:
        """0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3)."""
        return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))

    @staticmethod
    def derivative(x: Floats) -> Floats:
        """By the product rule; u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)."""
        t = np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)
