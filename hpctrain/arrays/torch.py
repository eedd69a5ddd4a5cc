"""torch tensors in host memory.

Owns the Arrays contract for torch.Tensor. Knows no other array library but NumPy, through which torch shows its memory
to Python. Nothing here is seen by autograd. The optimizers' arithmetic is in `torch_optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan, nan
from typing import Any

import torch

from hpctrain.arrays import torch_optim
from hpctrain.contracts import Array, UpdateNumbers
from hpctrain.dtypes import DTYPES
from hpctrain.errors import UnsupportedError, choices

__all__ = ["TorchArrays"]

_BLOCK = 64 * 1024  # elements; scratch of this size stays in cache
_TYPES = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}
#: A pairwise sum of float32 squares within these is right to some 1e-7: nothing overflowed, and what underflowed is
#: negligible.
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

    def memory(self, array: Array) -> memoryview:
        flat = self.flat(array)
        if flat.numel() == 0:
            return memoryview(bytearray())
        return memoryview(flat.view(torch.uint8).numpy())

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

    def combine(self, operation: str, target: Array, source: Array) -> None:
        if target.dtype in _LENT:
            target, source = target.numpy(), source.numpy()
            from hpctrain.arrays.numpy import NumpyArrays

            NumpyArrays().combine(operation, target, source)
        else:
            if operation != "sum" and source.dtype != target.dtype:
                source = source.to(target.dtype)
            _COMBINE[operation](target, source, out=target)

    def scale(self, array: Array, factor: float) -> None:
        array.detach().mul_(factor)

    def fill(self, array: Array, value: float) -> None:
        array.detach().fill_(value)

    def sum_of_squares(self, array: Array) -> float:
        real = torch.view_as_real(array).view(-1) if array.is_complex() else array
        total = 0.0
        scratch = torch.empty(min(_BLOCK, real.numel()), dtype=real.dtype)
        for block in real.split(_BLOCK):
            square = 0.0
            if block.dtype == torch.float32:
                # torch sums pairwise; a dot product of a block in float32 would be off by up to 3e-5.
                square = float(torch.mul(block, block, out=scratch[: block.numel()]).sum())
            if not _NORMAL_SQUARES[0] < square < _NORMAL_SQUARES[1]:  # squares may have left float32's range
                wide = block.double()
                square = float(torch.dot(wide, wide))
            total += square
        return total

    def abs_sum(self, array: Array) -> float:
        total = 0.0
        for block in array.detach().split(_BLOCK):
            part = float(block.abs().sum()) if block.dtype == torch.float32 else inf
            total += part if part < _LARGEST_SUM else float(block.abs().sum(dtype=torch.float64))
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
