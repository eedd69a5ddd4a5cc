"""The parameters of the NumPy network by formula: names and shapes, with no array library.

Owns what `hpctrain plan` needs to count the network; `mlp` builds its layers from the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["EMBEDDING", "MLPShape"]

EMBEDDING = 24  # width of the vector of one byte


@dataclass(frozen=True)
class MLPShape:
    """The numbers that define the network."""

    vocabulary: int = 256
    context: int = 8
    width: int = 128
    layers: int = 2

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the model's order."""
        shapes: dict[str, tuple[int, ...]] = {"0.weight": (self.vocabulary, EMBEDDING)}
        inputs = EMBEDDING * self.context
        for layer in range(self.layers):
            shapes |= {f"{1 + 2 * layer}.weight": (self.width, inputs), f"{1 + 2 * layer}.bias": (self.width,)}
            inputs = self.width
        last = 1 + 2 * self.layers
        return shapes | {f"{last}.weight": (self.vocabulary, inputs), f"{last}.bias": (self.vocabulary,)}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(prod(shape) for shape in self.parameters().values())

    def steps(self) -> dict[str, tuple[str, ...]]:
        """The layers that a pipeline can be cut between, by name, with their parameters: those of `make_layers`."""
        steps: dict[str, tuple[str, ...]] = {"embedding": ("0.weight",)}
        for number in range(1, 2 * self.layers + 2):
            linear = number % 2
            steps[f"linear {number}" if linear else f"gelu {number}"] = (
                (f"{number}.weight", f"{number}.bias") if linear else ())
        return steps

    def step_activations(self, batch: int, length: int) -> tuple[int, ...]:
        """`num_activations` of each of `steps`."""
        inputs = (0, EMBEDDING * self.context, *(self.width,) * (2 * self.layers))
        return tuple(batch * length * (kept + self.vocabulary * (step == len(inputs) - 1))
                     for step, kept in enumerate(inputs))

    def num_activations(self, batch: int, length: int) -> int:
        """Elements that forward of (batch, length) targets keeps for backward: inputs of each linear layer and GELU,
        and the gradient of the logits.
        """
        row = EMBEDDING * self.context + 2 * self.layers * self.width + self.vocabulary
        return batch * length * row
