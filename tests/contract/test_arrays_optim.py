"""The optimizers' arithmetic of every array library (hpctrain.contracts.Arrays.update), against torch's own. Local."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.arrays.torch import TorchArrays
from hpctrain.contracts import UpdateNumbers
from tests.collective_cases import as_library, to_numpy

BACKENDS = {"numpy": NumpyArrays(), "torch": TorchArrays(), "torch without its fused updates": TorchArrays()}
COUNTS = [70_001, 0, 3, 1]
TOLERANCES = {"float64": 1e-12, "float32": 2e-6}
# eps: where decay and gradient cancel, the first update of adam would turn on the last bits of the sum.
ADAM = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
SLOTS = {"adamw": 2, "adam": 2, "sgd": 1}


@pytest.fixture(params=BACKENDS)
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param.endswith("updates"):
        for rule in SLOTS:
            monkeypatch.delattr(torch, f"_fused_{rule}_")
    return BACKENDS[request.param]


def check(arrays: Any, make_reference: Any, dtype: str, gradient_dtype: str | None = None, *, copies: str | None = None,
          **numbers: Any) -> None:
    """Five updates and those of a torch optimizer on the same flat ranges; parameters must stay equal."""
    random = np.random.default_rng(1)
    start = [random.normal(size=n).astype(dtype) for n in COUNTS]
    reference = [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in start]
    optimizer = make_reference(reference)
    masters = [as_library(a, arrays.name) for a in start]
    num_slots = 0 if numbers["rule"] == "sgd" and not numbers["momentum"] else SLOTS[numbers["rule"]]
    states = [[arrays.zeros(n, dtype) for n in COUNTS] for _ in range(num_slots)]
    targets = [arrays.zeros(n, copies) for n in COUNTS] if copies else []
    scale = numbers.get("scale", 1.0)
    for step in range(1, 6):
        plain = [random.normal(size=n).astype(gradient_dtype or dtype) for n in COUNTS]
        for parameter, gradient in zip(reference, plain, strict=True):
            parameter.grad = torch.from_numpy(gradient.astype(dtype) * np.dtype(dtype).type(scale))
        optimizer.step()
        gradients = [as_library(g, arrays.name) for g in plain]
        arrays.update(UpdateNumbers(step=step, **numbers), masters, gradients, states, targets)
        for left, gradient in zip(gradients, plain, strict=True):
            np.testing.assert_allclose(to_numpy(left), gradient * scale, rtol=1e-6)
    tolerance = TOLERANCES[dtype]
    for ours, theirs in zip(masters, reference, strict=True):
        np.testing.assert_allclose(to_numpy(ours), theirs.detach().numpy(), rtol=tolerance, atol=tolerance)
    for target, master in zip(targets, masters, strict=False):
        rounded = to_numpy(master).astype(ml_dtypes.bfloat16 if copies == "bfloat16" else copies)
        np.testing.assert_array_equal(to_numpy(target), rounded)


def torch_adam(rule: str, weight_decay: float) -> Any:
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[rule]
    return lambda parameters: kind(parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=weight_decay,
                                   foreach=False)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-4])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam(arrays: Any, dtype: str, rule: str, scale: float, weight_decay: float) -> None:
    check(arrays, torch_adam(rule, weight_decay), dtype, rule=rule, scale=scale, weight_decay=weight_decay, **ADAM)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(arrays: Any, dtype: str, scale: float, weight_decay: float, momentum: float, nesterov: bool) -> None:
    def reference(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
                               foreach=False)

    check(arrays, reference, dtype, rule="sgd", scale=scale, lr=0.1, weight_decay=weight_decay, momentum=momentum,
          nesterov=nesterov)


@pytest.mark.parametrize("copies", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_compute_copies_are_written_along(arrays: Any, copies: str, scale: float) -> None:
    check(arrays, torch_adam("adamw", 0.1), "float32", copies=copies, rule="adamw", scale=scale, weight_decay=0.1,
          **ADAM)


def test_copies_of_ranges_that_are_cut_into_blocks(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("numpy", "torch"):
        monkeypatch.setattr(f"hpctrain.arrays.{library}_optim._BLOCK", 1000)
    check(arrays, torch_adam("adamw", 0.1), "float64", copies="float32", rule="adamw", scale=0.5, weight_decay=0.1,
          **ADAM)


@pytest.mark.parametrize("rule", ["adamw", "adam"])
def test_masters_may_be_wider_than_gradients(arrays: Any, rule: str) -> None:
    check(arrays, torch_adam(rule, 0.1), "float64", "float32", rule=rule, scale=0.25, weight_decay=0.1, **ADAM)


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_tiny_scales_do_not_turn_into_nan(arrays: Any, scale: float) -> None:
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    p, g, m, v = ([as_library(a, arrays.name)] for a in (ones, ones, zeros, zeros))
    arrays.update(UpdateNumbers("adamw", 0.1, scale=scale), p, g, [m, v])
    assert to_numpy(p[0]).tolist() == [1.0] * 3


def test_no_ranges_at_all(arrays: Any) -> None:
    arrays.update(UpdateNumbers("adamw", 0.1, scale=0.5), [], [], [[], []])
    arrays.update(UpdateNumbers("sgd", 0.1, scale=0.5, momentum=0.9), [], [], [[]], [])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (1, 5), (3, 3)])
def test_orthogonalize(arrays: Any, shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape)
    ours = as_library(matrix.reshape(-1), arrays.name)
    arrays.orthogonalize(ours, shape, 5)
    u, values, vh = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):  # what the polynomial does to each singular value
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert values.min() > 0.6 and values.max() < 1.3
    np.testing.assert_allclose(to_numpy(ours).reshape(shape), (u * values) @ vh, rtol=1e-9, atol=1e-9)
    zero = arrays.zeros(shape[0] * shape[1], "float64")
    arrays.orthogonalize(zero, shape, 5)
    assert (to_numpy(zero) == 0).all()


@pytest.mark.parametrize("rule", SLOTS)
@pytest.mark.parametrize("gradient", ["bfloat16", "float32"])
def test_masters_of_bfloat16(arrays: Any, rule: str, gradient: str) -> None:
    wide = np.linspace(-3, 3, 101)
    p, g, wide_g = (as_library(wide.astype(np.float32), arrays.name) for _ in range(3))
    half, half_g = arrays.empty(101, "bfloat16"), arrays.empty(101, "bfloat16")
    arrays.assign(half, p)
    arrays.assign(half_g, g)
    numbers = UpdateNumbers(rule, 0.25, scale=0.5, weight_decay=0.125, momentum=0.5, nesterov=True)
    other = half_g if gradient == "bfloat16" else wide_g
    for masters, gradients, dtype in ((p, g, "float32"), (half, other, "bfloat16")):
        arrays.update(numbers, [masters], [gradients], [[arrays.zeros(101, dtype)] for _ in range(SLOTS[rule])])
    np.testing.assert_allclose(to_numpy(half).astype(float), to_numpy(p), atol=0.05)
    assert np.abs(to_numpy(half).astype(float) - wide).max() > 0.2
