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
        arrays.combine(operation, target, as_library(a, arrays.name), as_library(b, arrays.name))
        np.testing.assert_array_equal(to_numpy(target), function(b, a).astype(a.dtype), err_msg=operation)


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


@backends
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_abs_sum_and_abs_max(arrays: Any, dtype: str) -> None:
    values = (np.random.default_rng(0).normal(size=100_003)).astype(numpy_dtype(dtype))
    values[70_000] = -9  # the largest by its absolute value alone
    sizes = np.abs(values.astype(np.complex128))
    tolerance = 1e-12 if dtype == "float64" else 5e-7
    assert arrays.abs_sum(as_library(values, arrays.name)) == pytest.approx(math.fsum(sizes), rel=tolerance)
    assert arrays.abs_max(as_library(values, arrays.name)) == 9.0 == sizes.max()
    same = np.full(100_003, 0.3).astype(numpy_dtype(dtype))
    exact = 100_003 * float(np.abs(same[0].astype(np.complex128)))
    assert arrays.abs_sum(as_library(same, arrays.name)) == pytest.approx(exact, rel=tolerance)
    for function in (arrays.abs_sum, arrays.abs_max):
        assert function(arrays.zeros(0, dtype)) == 0.0
        for bad in (np.nan, -np.inf, np.inf):
            for place in (0, 99_999):
                broken = values.copy()
                broken[place] = bad
                result = function(as_library(broken, arrays.name))
                assert math.isnan(result) if np.isnan(bad) else result == np.inf
    huge = np.full(4, 3e38, np.float32)
    assert arrays.abs_sum(as_library(huge, arrays.name)) == pytest.approx(1.2e39)


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
