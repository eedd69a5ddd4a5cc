"""torch tensors in host memory.

Owns the Arrays contract for torch.Tensor. Knows no other array library but NumPy, through which torch shows its memory
to Python. Nothing here is seen by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hpctrain.contracts import Array
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

    def adamw(self, parameters: Sequence[Array], gradients: Sequence[Array], exp_avg: Sequence[Array],
              exp_avg_sq: Sequence[Array], *, scale: float, lr: float, beta1: float, beta2: float, eps: float,
              weight_decay: float, step: int) -> None:
        columns = [list(c) for c in (parameters, gradients, exp_avg, exp_avg_sq)]
        fused = _fused("_fused_adamw_", columns)
        if fused is None:
            for p, g, m, v in zip(*map(_blocks, columns), strict=True):
                _adamw(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step)
        elif columns[0]:
            steps = [torch.tensor(float(step))] * len(columns[0])
            fused(*columns, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
                  amsgrad=False, maximize=False, grad_scale=_divisor(scale, columns[1]), found_inf=None)

    def sgd(self, parameters: Sequence[Array], gradients: Sequence[Array], momentum: Sequence[Array], *, scale: float,
            lr: float, momentum_factor: float, nesterov: bool, weight_decay: float, step: int) -> None:
        columns = [list(c) for c in (parameters, gradients, momentum if momentum_factor else parameters)]
        buffers = columns[2] if momentum_factor else []
        fused = _fused("_fused_sgd_", columns)
        if fused is None:
            for p, g, b in zip(*map(_blocks, columns), strict=True):
                _sgd(p, g, b if momentum_factor else None, scale, lr, momentum_factor, nesterov, weight_decay)
        elif columns[0]:
            fused(columns[0], columns[1], buffers, weight_decay=weight_decay, momentum=momentum_factor, lr=lr,
                  dampening=0.0, nesterov=nesterov, maximize=False, is_first_step=False,
                  grad_scale=_divisor(scale, columns[1]), found_inf=None)

    def set_num_threads(self, count: int) -> None:
        torch.set_num_threads(count)


def _fused(name: str, columns: list[list[Tensor]]) -> Callable[..., None] | None:
    """torch's one-pass update, if this torch has it and the types are alike; it is not public and may go away."""
    alike = len({t.dtype for column in columns for t in column}) <= 1
    return getattr(torch, name, None) if alike else None


def _divisor(scale: float, gradients: list[Tensor]) -> Tensor | None:
    """The fused updates divide the gradient by a float32 number; where that is too coarse, scales at once instead."""
    if scale == 1.0:
        return None
    if scale == 0.0 or gradients[0].dtype != torch.float32:
        for gradient in gradients:
            gradient.mul_(scale)
        return None
    return torch.tensor(1.0 / scale, dtype=torch.float32)


def _blocks(tensors: list[Tensor]) -> list[Tensor]:
    return [block for tensor in tensors for block in tensor.split(_BLOCK)]


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scale: float, lr: float, beta1: float, beta2: float, eps: float,
           weight_decay: float, step: int) -> None:
    g = g.mul_(scale).to(p.dtype)
    p.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = v.sqrt().div_(sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


def _sgd(p: Tensor, g: Tensor, b: Tensor | None, scale: float, lr: float, momentum_factor: float, nesterov: bool,
         weight_decay: float) -> None:
    g = g.mul_(scale).to(p.dtype).add(p, alpha=weight_decay)
    if b is not None:
        b.mul_(momentum_factor).add_(g)
        g = g.add_(b, alpha=momentum_factor) if nesterov else b
    p.add_(g, alpha=-lr)
