"""What every array library must do (hpctrain.contracts.Arrays). Local: the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from hpctrain.arrays import arrays_of
from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.arrays.torch import TorchArrays
from hpctrain.dtypes import DTYPES, OPERATIONS
from hpctrain.errors import UnsupportedError
from tests.collective_cases import as_library, to_numpy

BACKENDS = [NumpyArrays(), TorchArrays()]
backends = pytest.mark.parametrize("arrays", BACKENDS, ids=lambda a: a.name)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_and_arrays_are_two_views_of_one_thing(arrays: Any, dtype: str) -> None:
    for count in (0, 1, 5):
        array = arrays.zeros(count, dtype)
        assert arrays.dtype(array) == dtype
        assert arrays.shape(array) == (count,)
        assert arrays_of(array).name == arrays.name
        memory = arrays.memory(array)
        assert (len(memory), memory.format, memory.readonly) == (count * DTYPES[dtype].num_bytes, "B", False)
        again = arrays.from_memory(memory, dtype)
        arrays.fill(again, 1)
        assert (to_numpy(array) == numpy_dtype(dtype).type(1)).all()
        assert arrays.dtype(arrays.empty(count, dtype)) == dtype


@backends
def test_from_memory_keeps_the_memory_alive(arrays: Any) -> None:
    array = arrays.from_memory(memoryview(bytearray(400_000)), "float32")
    arrays.fill(array, 3.0)
    assert to_numpy(array).sum() == 300_000.0


@backends
def test_layouts(arrays: Any) -> None:
    plain = as_library(np.arange(12.0).reshape(3, 4), arrays.name)
    assert arrays.is_contiguous(plain)
    flat = arrays.flat(plain)
    flat[0] = 99.0
    assert plain[0, 0] == 99.0
    transposed = plain.T
    assert not arrays.is_contiguous(transposed)
    for call in (arrays.flat, arrays.memory):
        with pytest.raises(ValueError, match="not C-contiguous"):
            call(transposed)
    copied = arrays.to_flat(transposed)
    np.testing.assert_array_equal(to_numpy(copied), to_numpy(plain).T.reshape(-1))
    copied[0] = -1.0
    assert plain[0, 0] == 99.0
    arrays.assign(transposed, copied)
    assert plain[0, 0] == -1.0


@backends
def test_assign_casts_with_one_rounding(arrays: Any) -> None:
    wide = as_library(np.array([1.0, 257.0, 3.14159, -np.inf], np.float32), arrays.name)
    for dtype in ("float16", "bfloat16", "float64"):
        target = arrays.empty(4, dtype)
        arrays.assign(target, wide)
        np.testing.assert_array_equal(to_numpy(target), to_numpy(wide).astype(numpy_dtype(dtype)))


COMBINE = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "band": np.bitwise_and, "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def test_every_reduction_is_a_combination() -> None:
    assert {*COMBINE, "mean"} == set(OPERATIONS)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(arrays: Any, dtype: str) -> None:
    a, b = (np.array(values).astype(numpy_dtype(dtype)) for values in ([1, 5, 3, 0, 0], [4, 2, 3, 0, 7]))
    for operation, function in COMBINE.items():
        if DTYPES[dtype].kind not in OPERATIONS[operation]:
            continue
        target = as_library(a, arrays.name)
        arrays.combine(operation, target, as_library(b, arrays.name))
        np.testing.assert_array_equal(to_numpy(target), function(a, b).astype(a.dtype), err_msg=operation)


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_combine_adds_halves_into_float32_as_they_are(arrays: Any, dtype: str) -> None:
    target = arrays.zeros(100_001, "float32")
    arrays.fill(target, 2048.0)
    source = arrays.zeros(100_001, dtype)
    arrays.fill(source, 1.0)
    for operation, value in (("sum", 2049.0), ("max", 2049.0), ("min", 1.0), ("prod", 1.0)):
        arrays.combine(operation, target, source)
        assert (to_numpy(target) == value).all()


@backends
def test_nan_comes_through_min_and_max(arrays: Any) -> None:
    for operation in ("min", "max"):
        target = as_library(np.array([np.nan, 1.0]), arrays.name)
        arrays.combine(operation, target, as_library(np.array([1.0, np.nan]), arrays.name))
        assert np.isnan(to_numpy(target)).all()


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_scale(arrays: Any, dtype: str) -> None:
    array = as_library((np.arange(100_001) % 251).astype(numpy_dtype(dtype)), arrays.name)
    expected = to_numpy(array).copy()
    wide = expected.astype(np.float32) if DTYPES[dtype].num_bytes == 2 else expected
    expected = (wide * wide.dtype.type(0.3)).astype(expected.dtype)
    arrays.scale(array, 0.3)
    np.testing.assert_allclose(to_numpy(array).astype(complex), expected.astype(complex), rtol=1e-6)


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_sum_of_squares(arrays: Any, dtype: str) -> None:
    values = (np.random.default_rng(0).normal(size=100_003)).astype(numpy_dtype(dtype))
    exact = math.fsum(np.abs(values.astype(np.complex128)) ** 2)
    tolerance = 1e-12 if dtype == "float64" else 5e-7  # float32 squares may be rounded before they are added
    assert arrays.sum_of_squares(as_library(values, arrays.name)) == pytest.approx(exact, rel=tolerance)
    same = np.full(100_003, 0.3).astype(numpy_dtype(dtype))  # all round the same way: a plain running sum drifts
    exact = 100_003 * float(np.abs(same[0].astype(np.complex128))) ** 2
    assert arrays.sum_of_squares(as_library(same, arrays.name)) == pytest.approx(exact, rel=tolerance)
    assert arrays.sum_of_squares(arrays.zeros(0, dtype)) == 0.0
    assert arrays.sum_of_squares(as_library(np.array([1e30], np.float32), arrays.name)) == pytest.approx(1e60, rel=1e-6)
    assert math.isnan(arrays.sum_of_squares(as_library(np.array([np.nan, 1.0]), arrays.name)))
    assert math.isinf(arrays.sum_of_squares(as_library(np.array([-np.inf, 1.0]), arrays.name)))


# Optimizers against torch's own ------------------------------------------------------------------------------------

COUNTS = [70_001, 0, 3, 1]
TOLERANCES = {"float64": 1e-12, "float32": 2e-6}


def optimize(update: Any, make_reference: Any, library: str, dtype: str, scale: float, num_state: int) -> None:
    """Five steps of `update` and of a torch optimizer on the same flat ranges; parameters must stay equal."""
    random = np.random.default_rng(1)
    start = [random.normal(size=n).astype(dtype) for n in COUNTS]
    reference = [torch.nn.Parameter(torch.from_numpy(a.copy())) for a in start]
    optimizer = make_reference(reference)
    parameters = [as_library(a, library) for a in start]
    state = [[as_library(np.zeros_like(a), library) for a in start] for _ in range(num_state)]
    for step in range(1, 6):
        gradients = [random.normal(size=n).astype(dtype) for n in COUNTS]
        for parameter, gradient in zip(reference, gradients):
            parameter.grad = torch.from_numpy(gradient * np.dtype(dtype).type(scale))
        optimizer.step()
        update(parameters, [as_library(g, library) for g in gradients], state, step)
    for ours, theirs in zip(parameters, reference):
        tolerance = TOLERANCES[dtype]
        np.testing.assert_allclose(to_numpy(ours), theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["numpy", "torch", "torch without its fused updates"])
def optimizing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param.endswith("updates"):
        monkeypatch.delattr(torch, "_fused_adamw_")
        monkeypatch.delattr(torch, "_fused_sgd_")
    return BACKENDS[request.param != "numpy"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-4])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(optimizing: Any, dtype: str, scale: float, weight_decay: float) -> None:
    def update(parameters: Any, gradients: Any, state: Any, step: int) -> None:
        optimizing.adamw(parameters, gradients, state[0], state[1], scale=scale, lr=0.01, beta1=0.8, beta2=0.95,
                         eps=1e-6, weight_decay=weight_decay, step=step)

    def reference(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay,
                                 foreach=False)

    optimize(update, reference, optimizing.name, dtype, scale, 2)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(optimizing: Any, dtype: str, scale: float, weight_decay: float, momentum: float, nesterov: bool) -> None:
    def update(parameters: Any, gradients: Any, state: Any, step: int) -> None:
        optimizing.sgd(parameters, gradients, state[0] if momentum else [], scale=scale, lr=0.1,
                       momentum_factor=momentum, nesterov=nesterov, weight_decay=weight_decay, step=step)

    def reference(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
                               foreach=False)

    optimize(update, reference, optimizing.name, dtype, scale, 1)


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_tiny_scales_do_not_turn_into_nan(optimizing: Any, scale: float) -> None:
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    parameters, gradients, first, second = ([as_library(a, optimizing.name)] for a in (ones, ones, zeros, zeros))
    optimizing.adamw(parameters, gradients, first, second, scale=scale, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8,
                     weight_decay=0.0, step=1)
    assert to_numpy(parameters[0]).tolist() == [1.0] * 3


@backends
def test_no_ranges_at_all(arrays: Any) -> None:
    arrays.adamw([], [], [], [], scale=0.5, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)
    arrays.sgd([], [], [], scale=0.5, lr=0.1, momentum_factor=0.9, nesterov=True, weight_decay=0.0, step=1)


def test_the_number_of_threads() -> None:
    from threadpoolctl import threadpool_info

    before = torch.get_num_threads()
    try:
        for arrays in BACKENDS:
            arrays.set_num_threads(1)
        assert torch.get_num_threads() == 1
        assert all(pool["num_threads"] == 1 for pool in threadpool_info() if pool["user_api"] == "blas")
    finally:
        for arrays in BACKENDS:
            arrays.set_num_threads(before)


def test_arrays_of_nothing_known() -> None:
    for value in ([1.0], 3.0, np.float64(3.0), "text", None):
        with pytest.raises(UnsupportedError, match="not an array"):
            arrays_of(value)
