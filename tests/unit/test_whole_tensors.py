"""LAMB and Muon against their formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.arrays.torch import TorchArrays
from hpctrain.optim.options import LAMB, Muon
from hpctrain.optim.whole_tensors import WholeTensor, update_whole
from tests.collective_cases import as_library, to_numpy

BACKENDS = [NumpyArrays(), TorchArrays()]
backends = pytest.mark.parametrize("arrays", BACKENDS, ids=lambda a: a.name)
SHAPES = {"weight": (6, 4), "wide": (3, 5), "bias": (4,), "cube": (2, 3, 2), "embedding": (5, 2), "one": (1, 1)}


def train(arrays: Any, optimizer: LAMB | Muon, name: str, dtype: str, weight_decay: float,
          num_updates: int = 4) -> tuple[Any, Any, list[Any]]:
    """(first, last, gradients * 0.5) of one tensor that is updated a few times."""
    random = np.random.default_rng(3)
    first = random.normal(size=SHAPES[name]).astype(dtype)
    master = as_library(first.reshape(-1), arrays.name)
    tensor = WholeTensor(name, SHAPES[name], master, [arrays.zeros(first.size, dtype) for _ in range(2)])
    gradients = [random.normal(size=SHAPES[name]).astype(dtype) for _ in range(num_updates)]
    for step, gradient in enumerate(gradients, 1):
        numbers = optimizer.numbers(lr=optimizer.lr, weight_decay=weight_decay, step=step, scale=0.5)
        flat = as_library(gradient.reshape(-1), arrays.name)
        update_whole(arrays, optimizer, tensor, flat, numbers)
        np.testing.assert_allclose(to_numpy(flat), 0.5 * gradient.reshape(-1))
    return first, to_numpy(master).reshape(SHAPES[name]), [0.5 * g for g in gradients]


def lamb(x: Any, gradients: list[Any], o: LAMB, weight_decay: float) -> Any:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g
        u = m / (1 - o.betas[0] ** t) / (np.sqrt(v / (1 - o.betas[1] ** t)) + o.eps) + weight_decay * x
        x = x - o.lr * np.linalg.norm(x) / np.linalg.norm(u) * u
    return x


def muon(x: Any, gradients: list[Any], o: Muon, weight_decay: float) -> Any:
    m = np.zeros_like(x)
    for g in gradients:
        m = o.momentum * m + g
        u, values, vh = np.linalg.svd(g + o.momentum * m if o.nesterov else m, full_matrices=False)
        values = values / np.linalg.norm(values)
        for _ in range(o.num_steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        x = x * (1 - o.lr * weight_decay) - o.lr * 0.2 * max(x.shape) ** 0.5 * (u * values) @ vh
    return x


@backends
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_lamb(arrays: Any, name: str, weight_decay: float, dtype: str, tolerance: float) -> None:
    options = LAMB(lr=0.02, betas=(0.8, 0.95))
    first, last, gradients = train(arrays, options, name, dtype, weight_decay)
    expected = lamb(first.astype(float), [g.astype(float) for g in gradients], options, weight_decay)
    np.testing.assert_allclose(last, expected, rtol=tolerance, atol=tolerance)


@backends
def test_a_step_of_lamb_is_as_long_as_the_tensor_times_lr(arrays: Any) -> None:
    for length in (3.0, 8.0):
        master = as_library(np.full(4, length / 2), arrays.name)
        tensor = WholeTensor("x", (4,), master, [arrays.zeros(4, "float64") for _ in range(2)])
        gradient = as_library(np.ones(4), arrays.name)
        update_whole(arrays, LAMB(), tensor, gradient, LAMB().numbers(lr=1e-3, weight_decay=0.0, step=1, scale=1.0))
        assert np.linalg.norm(to_numpy(master) - length / 2) == pytest.approx(1e-3 * length, rel=1e-9)


@backends
@pytest.mark.parametrize(("value", "gradient"), [(0.0, 1.0), (2.0, 0.0)])
def test_the_ratio_of_lamb_is_1_where_a_norm_is_0(arrays: Any, value: float, gradient: float) -> None:
    master = as_library(np.full(4, value), arrays.name)
    tensor = WholeTensor("x", (4,), master, [arrays.zeros(4, "float64") for _ in range(2)])
    numbers = LAMB().numbers(lr=0.1, weight_decay=0.0, step=1, scale=1.0)
    update_whole(arrays, LAMB(), tensor, as_library(np.full(4, gradient), arrays.name), numbers)
    np.testing.assert_allclose(to_numpy(master), value - 0.1 * gradient, rtol=1e-5)


@backends
@pytest.mark.parametrize("name", ["weight", "wide", "one"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_muon_on_matrices(arrays: Any, name: str, weight_decay: float, nesterov: bool, dtype: str,
                          tolerance: float) -> None:
    options = Muon(lr=0.02, momentum=0.9, nesterov=nesterov)
    first, last, gradients = train(arrays, options, name, dtype, weight_decay)
    expected = muon(first.astype(float), [g.astype(float) for g in gradients], options, weight_decay)
    np.testing.assert_allclose(last, expected, rtol=tolerance, atol=tolerance)


@backends
@pytest.mark.parametrize("name", ["bias", "cube", "embedding"])
def test_muon_leaves_the_rest_to_adamw(arrays: Any, name: str) -> None:
    _, ours, _ = train(arrays, Muon(lr=0.02), name, "float64", 0.1)
    random = np.random.default_rng(3)
    x = random.normal(size=SHAPES[name])
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, 5):
        g = 0.5 * random.normal(size=SHAPES[name])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x * (1 - 0.02 * 0.1) - 0.02 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(ours, x, rtol=1e-12)
