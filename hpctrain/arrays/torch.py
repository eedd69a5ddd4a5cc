"""torch tensors in host memory.

Owns the Arrays contract for torch.Tensor. Knows no other array library but NumPy, through which torch shows its memory
to Python. Nothing here is seen by autograd. The optimizers' arithmetic is in `torch_optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan, nan
from typing import Any

import torch
from torch import Tensor

from hpctrain.arrays import torch_optim
from hpctrain.contracts import Array, UpdateNumbers
from hpctrain.dtypes import DTYPES
from hpctrain.errors import UnsupportedError, choices

__all__ = ["TorchArrays"]

_BLOCK = 512 * 1024  # elements; scratch of this size stays in cache
_ROW = 128  # elements whose sum may be carried in float32: right to some 1e-7, where a long running sum drifts by 1e-2
_TYPES = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}
#: A sum of float32 squares within these is right to some 1e-7: nothing overflowed, and what underflowed is negligible.
_NORMAL_SQUARES = (1e-24, 1e38)
#: A float32 sum below this did not overflow on its way.
_LARGEST_SUM = 1e38
#: torch has no arithmetic for these; NumPy has, on the same memory.
_LENT = frozenset({torch.uint16, torch.uint32, torch.uint64})


class TorchArrays:
    """See `hpctrain.contracts.Arrays`. Free of state; one instance serves all threads of a process."""

    name = "torch"

    def dtype(self, array: Array) -> str:
        try:
            return _NAMES[array.dtype]
        except KeyError:
            raise UnsupportedError(f"{array.dtype} is not supported; legal are {choices(DTYPES)}") from None

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def is_contiguous(self, array: Array) -> bool:
        # A lazy conjugate or negative is contiguous to torch, but its memory holds other values.
        return bool(array.is_contiguous()) and not array.is_conj() and not array.is_neg()

    def empty(self, count: int, dtype: str) -> Array:
        return torch.empty(count, dtype=_TYPES[dtype])

    def zeros(self, count: int, dtype: str) -> Array:
        return torch.zeros(count, dtype=_TYPES[dtype])

    def from_memory(self, memory: memoryview, dtype: str) -> Array:
        return torch.frombuffer(memory, dtype=_TYPES[dtype]) if len(memory) else self.empty(0, dtype)

    def shaped(self, flat: Array, shape: Sequence[int]) -> Array:
        return flat.view(tuple(shape))

    def memory(self, array: Array) -> memoryview:
        if array.numel() == 0:
            return memoryview(bytearray())
        return memoryview(self.flat(array).view(torch.uint8).numpy())

    def flat(self, array: Array) -> Array:
        if not self.is_contiguous(array):
            raise ValueError(f"a tensor of shape {tuple(array.shape)} and strides {array.stride()} is not C-contiguous")
        # as_strided, because a contiguous tensor of one element may carry any stride.
        return array.detach().as_strided((array.numel(),), (1,))

    def to_flat(self, array: Array) -> Array:
        plain = array.detach().resolve_conj().resolve_neg()
        return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).view(-1)

    def assign(self, target: Array, source: Array) -> None:
        target, source = target.detach(), source.detach()
        if target.is_contiguous():
            target.view(source.shape).copy_(source)
        else:
            target.copy_(source.reshape(target.shape))

    def combine(self, operation: str, target: Array, source: Array, first: Array | None = None) -> None:
        first = target if first is None else first
        if target.dtype in _LENT:
            from hpctrain.arrays.numpy import NumpyArrays

            NumpyArrays().combine(operation, target.numpy(), source.numpy(), first.numpy())
        else:
            if operation != "sum" and source.dtype != target.dtype:
                source = source.to(target.dtype)
            _COMBINE[operation](first, source, out=target)

    def scale(self, array: Array, factor: float) -> None:
        array.detach().mul_(factor)

    def fill(self, array: Array, value: float) -> None:
        array.detach().fill_(value)

    def sum_of_squares(self, array: Array) -> float:
        total = 0.0
        for block in _real(array).split(4 * _BLOCK):  # almost no scratch: fewer calls
            lengths = _row_lengths(block)
            square = float(torch.dot(lengths, lengths))
            if not _NORMAL_SQUARES[0] < square < _NORMAL_SQUARES[1]:  # squares may have left float32's range
                wide = block.double()
                square = float(torch.dot(wide, wide))
            total += square
        return total

    def abs_sum(self, array: Array) -> float:
        plain = array.detach()
        total = 0.0
        for block in plain.split(_BLOCK):
            sizes = block.abs()
            part = float(sizes.sum()) if sizes.dtype == torch.float32 else inf  # torch sums pairwise
            total += part if part < _LARGEST_SUM else float(sizes.sum(dtype=torch.float64))
        return total

    def abs_max(self, array: Array) -> float:
        largest = 0.0
        for block in array.detach().split(_BLOCK) if array.numel() else ():
            low, high = torch.aminmax(block.abs() if block.is_complex() else block)
            largest = max(float(-low), float(high), largest)
            if isnan(low):
                return nan
        return largest

    def update(self, numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
               states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
        torch_optim.update(numbers, masters, gradients, states, copies)

    def orthogonalize(self, matrix: Array, shape: tuple[int, int], num_steps: int) -> None:
        torch_optim.orthogonalize(matrix, shape, num_steps)

    def set_num_threads(self, count: int) -> None:
        torch.set_num_threads(count)


def _real(array: Tensor) -> Tensor:
    plain = array.detach()
    return torch.view_as_real(plain).view(-1) if plain.is_complex() else plain


def _row_lengths(block: Tensor) -> Tensor:
    """L2 norms of short rows of `block`, in float64; what is over counts as rows of one element."""
    if block.dtype == torch.float64:
        return block
    single = block.float()
    border = block.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(single[:border].view(-1, _ROW), dim=1)
    return torch.cat((rows, single[border:])).double()
