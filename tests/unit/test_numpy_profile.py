"""What the layers of a NumPy network cost."""

from __future__ import annotations

import numpy as np
import pytest

import hpctrain.numpy as n
from hpctrain.errors import ConfigError
from hpctrain.models.mlp import make_layers, rows
from hpctrain.models.mlp_shape import EMBEDDING, MLPShape
from hpctrain.plan.pipeline.partition import by_parameters, by_time

SHAPE = MLPShape(vocabulary=11, context=3, width=6, layers=1)
TOKENS = np.arange(20).reshape(2, 10) % 11
BATCH = rows((TOKENS, TOKENS), 3)


def test_bytes_and_times_and_nothing_changed() -> None:
    layers = make_layers(SHAPE)
    before = [p.value.copy() for layer in layers for p in layer.parameters.values()]
    found = n.profile(layers, n.cross_entropy, BATCH, repeats=2)
    assert [cost.activation_bytes for cost in found] == [4 * 20 * size for size in (3 * EMBEDDING, 6, 6)] + [0]
    assert [cost.parameter_bytes for cost in found] == [
        4 * 11 * EMBEDDING, 4 * 6 * (3 * EMBEDDING + 1), 0, 4 * 11 * 7]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in found)
    held = [p for layer in layers for p in layer.parameters.values()]
    assert all(np.array_equal(p.value, values) and p.gradient is None for p, values in zip(held, before, strict=True))
    assert by_time(found, 2)[-1] == by_parameters(found, 2)[-1] == 4
    with pytest.raises(ConfigError, match="repeats = 0"):
        n.profile(layers, n.cross_entropy, BATCH, repeats=0)


def test_which_layer_is_slow() -> None:
    def linear(inputs: int, outputs: int) -> n.Linear:
        return n.Linear(n.Parameter(np.ones((outputs, inputs))))

    batch = np.ones((256, 8)), np.ones((256, 8))
    found = n.profile([linear(8, 1024), linear(1024, 1024), linear(1024, 8)], n.squared_error, batch)
    assert max(range(3), key=lambda i: found[i].forward) == max(range(3), key=lambda i: found[i].backward) == 1
