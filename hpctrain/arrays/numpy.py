"""NumPy arrays in host memory; bfloat16 by ml_dtypes.

Owns the Arrays contract for numpy.ndarray. Knows no other library. Large operations run in blocks that fit the cache,
so no temporary as large as the arrays is ever made. The optimizers' arithmetic is in `numpy_optim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from hpctrain.arrays import numpy_optim
from hpctrain.contracts import Array, UpdateNumbers
from hpctrain.dtypes import DTYPES
from hpctrain.errors import UnsupportedError, choices

__all__ = ["NumpyArrays"]

_BLOCK = 32 * 1024  # elements; a handful of float32 blocks of this size fit a core's second-level cache
_TYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_COMBINE = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}


class NumpyArrays:
    """See `hpctrain.contracts.Arrays`. Free of state; one instance serves all threads of a process."""

    name = "numpy"

    def dtype(self, array: Array) -> str:
        try:
            return _NAMES[array.dtype]
        except KeyError:
            raise UnsupportedError(
                f"numpy dtype {str(array.dtype)!r} ({array.dtype.byteorder}) is not supported; "
                f"legal are {choices(DTYPES)} in native byte order"
            ) from None

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous)

    def empty(self, count: int, dtype: str) -> Array:
        return np.empty(count, _TYPES[dtype])

    def zeros(self, count: int, dtype: str) -> Array:
        return np.zeros(count, _TYPES[dtype])

    def from_memory(self, memory: memoryview, dtype: str) -> Array:
        return np.frombuffer(memory, np.uint8).view(_TYPES[dtype]) if len(memory) else np.empty(0, _TYPES[dtype])

    def shaped(self, flat: Array, shape: Sequence[int]) -> Array:
        return flat.reshape(tuple(shape))

    def memory(self, array: Array) -> memoryview:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous")
        if array.size == 0:
            return memoryview(bytearray())
        # Through uint8, because bfloat16 has no format in Python's buffer protocol.
        return np.asarray(array).reshape(-1).view(np.uint8).data

    def flat(self, array: Array) -> Array:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous")
        return np.asarray(array).reshape(-1)

    def to_flat(self, array: Array) -> Array:
        return np.array(array, order="C", copy=True, subok=False).reshape(-1)

    def assign(self, target: Array, source: Array) -> None:
        np.copyto(target, source.reshape(target.shape), casting="unsafe")

    def combine(self, operation: str, target: Array, source: Array) -> None:
        _COMBINE[operation](target, source, out=target)

    def scale(self, array: Array, factor: float) -> None:
        if array.dtype.itemsize == 2:
            for block in _blocks(array):
                block[...] = block.astype(np.float32) * np.float32(factor)
        else:
            np.multiply(array, array.dtype.type(factor), out=array)

    def fill(self, array: Array, value: float) -> None:
        array.fill(value)

    def sum_of_squares(self, array: Array) -> float:
        real = array.view(array.real.dtype) if array.dtype.kind == "c" else array
        total = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for block in _blocks(real):
                wide = block.astype(np.float64)
                total += float(np.dot(wide, wide))
        return total

    def abs_sum(self, array: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return sum(float(np.abs(block).sum(dtype=np.float64)) for block in _blocks(array))

    def abs_max(self, array: Array) -> float:
        largest = 0.0
        for block in _blocks(array):
            wide = block.astype(np.float32) if array.dtype.itemsize == 2 else block
            largest = float(np.maximum(largest, np.abs(wide).max()))
        return largest

    def update(self, numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
               states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
        numpy_optim.update(numbers, masters, gradients, states, copies)

    def orthogonalize(self, matrix: Array, shape: tuple[int, int], num_steps: int) -> None:
        numpy_optim.orthogonalize(matrix, shape, num_steps)

    def set_num_threads(self, count: int) -> None:
        threadpool_limits(limits=count)


def _blocks(array: Array) -> Iterator[Array]:
    return (array[start : start + _BLOCK] for start in range(0, array.size, _BLOCK))
