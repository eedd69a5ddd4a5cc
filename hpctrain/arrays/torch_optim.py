"""Optimizer arithmetic on torch tensors in host memory, in blocks that fit the cache: one pass over memory.

Owns the element-wise updates and the orthogonalisation of a matrix. Knows numbers, not what an optimizer is.

    for each block:   torch's fused update    scales the gradient, reads and writes masters and states
                      copy = master           from cache
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from hpctrain.contracts import Array, UpdateNumbers

__all__ = ["orthogonalize", "update"]

_BLOCK = 512 * 1024  # elements for each thread: so large that calls cost little, so small that a master is in cache
_UNLIMITED = sys.maxsize

Columns = list[list[Tensor]]


def update(numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
           states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
    """See `hpctrain.contracts.Arrays.update`."""
    columns = [[t.detach() for t in column] for column in (masters, gradients, *states, *([copies] if copies else []))]
    alike = len({t.dtype for column in columns[: 2 + len(states)] for t in column}) <= 1
    # torch's one-pass updates are not public and may go away. That of SGD leaves most of a half-type master unchanged
    # (seen in torch 2.13).
    broken = numbers.rule == "sgd" and any(master.element_size() < 4 for master in columns[0])
    fused = None if broken else getattr(torch, f"_fused_{numbers.rule}_", None)
    size = _UNLIMITED if alike and not copies and fused is not None else _BLOCK * torch.get_num_threads()
    for p, g, *rest in _batches(columns, size):
        scaled, divisor = g, None
        if not alike:
            scaled = [gradient.to(p[0].dtype).mul_(numbers.scale) for gradient in g]
        elif fused is not None and g[0].dtype == torch.float32 and numbers.scale not in (0.0, 1.0):
            divisor = torch.tensor(1.0 / numbers.scale, dtype=torch.float32)
        elif numbers.scale != 1.0:
            torch._foreach_mul_(g, numbers.scale)
        if fused is None:
            _plainly(numbers, p, scaled, rest)
        else:
            _FUSED[numbers.rule](fused, numbers, p, scaled, rest, divisor)
        if not alike:
            _copy(g, scaled)
        if copies:
            _copy(rest[-1], p)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _batches(columns: Columns, size: int) -> Iterator[Columns]:
    """Cuts all columns alike into batches of at most `size` elements; small tensors share a batch, none is empty."""
    batch: Columns = [[] for _ in columns]
    room = size
    for row in zip(*columns, strict=True):
        start, count = 0, row[0].numel()
        while start < count:
            taken = min(room, count - start)
            for column, tensor in zip(batch, row, strict=True):
                column.append(tensor[start : start + taken])
            start, room = start + taken, room - taken
            if not room:
                yield batch
                batch, room = [[] for _ in columns], size
    if batch[0]:
        yield batch


def _fused_adam(fused: Callable[..., None], numbers: UpdateNumbers, p: list[Tensor], g: list[Tensor], rest: Columns,
                divisor: Tensor | None) -> None:
    steps = [torch.tensor(float(numbers.step))] * len(p)
    fused(p, g, rest[0], rest[1], [], steps, lr=numbers.lr, beta1=numbers.beta1, beta2=numbers.beta2,
          weight_decay=numbers.weight_decay, eps=numbers.eps, amsgrad=False, maximize=False, grad_scale=divisor,
          found_inf=None)


def _fused_sgd(fused: Callable[..., None], numbers: UpdateNumbers, p: list[Tensor], g: list[Tensor], rest: Columns,
               divisor: Tensor | None) -> None:
    fused(p, g, rest[0] if numbers.momentum else [], weight_decay=numbers.weight_decay, momentum=numbers.momentum,
          lr=numbers.lr, dampening=0.0, nesterov=numbers.nesterov, maximize=False, is_first_step=False,
          grad_scale=divisor, found_inf=None)


_FUSED = {"adamw": _fused_adam, "adam": _fused_adam, "sgd": _fused_sgd}


def _plainly(numbers: UpdateNumbers, p: list[Tensor], g: list[Tensor], rest: Columns) -> None:
    for i in range(len(p)):
        if numbers.rule == "sgd":
            _plain_sgd(numbers, p[i], g[i], rest[0][i] if numbers.momentum else None)
        else:
            _plain_adam(numbers, p[i], g[i], rest[0][i], rest[1][i])


def _plain_adam(numbers: UpdateNumbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    if numbers.rule == "adam":
        g = g.add(p, alpha=numbers.weight_decay)
    else:
        p.mul_(1 - numbers.lr * numbers.weight_decay)
    m.lerp_(g, 1 - numbers.beta1)
    v.mul_(numbers.beta2).addcmul_(g, g, value=1 - numbers.beta2)
    denominator = v.sqrt().div_(sqrt(1 - numbers.beta2**numbers.step)).add_(numbers.eps)
    p.addcdiv_(m, denominator, value=-numbers.lr / (1 - numbers.beta1**numbers.step))


def _plain_sgd(numbers: UpdateNumbers, p: Tensor, g: Tensor, buffer: Tensor | None) -> None:
    g = g.add(p, alpha=numbers.weight_decay)
    if buffer is not None:
        buffer.mul_(numbers.momentum).add_(g)
        g = g.add_(buffer, alpha=numbers.momentum) if numbers.nesterov else buffer
    p.add_(g, alpha=-numbers.lr)


def orthogonalize(matrix: Array, shape: tuple[int, int], num_steps: int) -> None:
    """See `hpctrain.contracts.Arrays.orthogonalize`."""
    target = matrix.detach().view(shape)
    x = target.T if shape[0] > shape[1] else target
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    target.copy_(x.T if shape[0] > shape[1] else x)
