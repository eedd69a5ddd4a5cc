"""A multi-layer network in NumPy that predicts the next byte from a fixed number of bytes before it.

Owns its layers, initial values and the way samples become rows. Must not know ranks or engines. Needs no torch.

    bytes (rows, context) -> embedding, joined -> [ linear -> GELU ] x layers -> linear -> logits (rows, vocabulary)

Source of the idea: Bengio et al., "A Neural Probabilistic Language Model", JMLR 2003.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from hpctrain.models.initial import normal
from hpctrain.models.mlp_shape import MLPShape
from hpctrain.numpy import Embedding, Gelu, Linear, Network, Parameter, cross_entropy, network

__all__ = ["make_layers", "make_mlp", "rows"]


def make_mlp(shape: MLPShape, *, seed: int = 0, dtype: str = "float32") -> Network:
    """The network as a Model. Local."""
    return network(make_layers(shape, seed=seed, dtype=dtype), cross_entropy)


def make_layers(shape: MLPShape, *, seed: int = 0, dtype: str = "float32") -> list[Any]:
    """Its layers: matrices normal with deviation 1 / sqrt(inputs), the embedding 1, biases 0. Local."""
    held = {name: Parameter(_values(name, sizes, seed).astype(dtype)) for name, sizes in shape.parameters().items()}
    layers: list[Any] = [Embedding(held["0.weight"])]
    for layer in range(shape.layers):
        layers += [Linear(held[f"{1 + 2 * layer}.weight"], held[f"{1 + 2 * layer}.bias"]), Gelu()]
    last = 1 + 2 * shape.layers
    layers.append(Linear(held[f"{last}.weight"], held[f"{last}.bias"]))
    return layers


def _values(name: str, sizes: tuple[int, ...], seed: int) -> np.ndarray:
    if len(sizes) == 1:
        return np.zeros(sizes)
    std = 1.0 if name == "0.weight" else sizes[1] ** -0.5
    return normal(seed, name, 0, prod(sizes), std).reshape(sizes)


def rows(sample: tuple[np.ndarray, np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples (batch, length) as one row a target: the `context` bytes before it (batch x length, context), and itself.

    Where a sample does not reach back that far, 0 bytes stand in, as at the start of a document.
    """
    inputs, targets = sample
    padded = np.pad(inputs, ((0, 0), (context - 1, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, context, axis=1).reshape(-1, context), targets.reshape(-1)
