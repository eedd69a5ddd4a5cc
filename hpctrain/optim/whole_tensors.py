"""Updates that look at whole tensors: LAMB and Muon, made of element-wise updates, norms and one matrix operation.

Knows Arrays; not which rank owns a tensor. The direction of a step comes from the element-wise update of a tensor of
zeros with lr = 1 and no decay, which leaves minus the direction there and the states where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod, sqrt

from hpctrain.contracts import Array, Arrays, UpdateNumbers
from hpctrain.optim.options import LAMB, Muon

__all__ = ["WholeTensor", "update_whole"]


@dataclass(frozen=True)
class WholeTensor:
    """One tensor of this rank: flat arrays of equal length. `copy` receives the rounded master, if there is one."""

    name: str
    shape: tuple[int, ...]
    master: Array
    states: list[Array]
    copy: Array | None = None


def update_whole(arrays: Arrays, optimizer: LAMB | Muon, tensor: WholeTensor, gradient: Array,
                 numbers: UpdateNumbers) -> None:
    """One update of one whole tensor. Leaves `numbers.scale * gradient` in `gradient`. Local."""
    if isinstance(optimizer, LAMB):
        _lamb(arrays, tensor, gradient, numbers)
    elif _is_matrix(optimizer, tensor):
        _muon(arrays, optimizer, tensor, gradient, numbers)
    else:
        arrays.update(numbers, [tensor.master], [gradient], [[state] for state in tensor.states])
    if tensor.copy is not None:
        arrays.assign(tensor.copy, tensor.master)


def _is_matrix(optimizer: Muon, tensor: WholeTensor) -> bool:
    return len(tensor.shape) == 2 and prod(tensor.shape) > 0 and not any(
        fnmatchcase(tensor.name, pattern) for pattern in optimizer.adamw)


def _minus_direction(arrays: Arrays, tensor: WholeTensor, gradient: Array, states: list[Array],
                     numbers: UpdateNumbers) -> Array:
    step = arrays.zeros(arrays.shape(tensor.master)[0], arrays.dtype(tensor.master))
    arrays.update(replace(numbers, lr=1.0, weight_decay=0.0), [step], [gradient], [[state] for state in states])
    return step


def _lamb(arrays: Arrays, tensor: WholeTensor, gradient: Array, numbers: UpdateNumbers) -> None:
    step = _minus_direction(arrays, tensor, gradient, tensor.states, numbers)
    if numbers.weight_decay:
        decay = arrays.to_flat(tensor.master)
        arrays.scale(decay, -numbers.weight_decay)
        arrays.combine("sum", step, decay)
    length, of_step = (sqrt(arrays.sum_of_squares(x)) for x in (tensor.master, step))
    arrays.scale(step, numbers.lr * (length / of_step if length and of_step else 1.0))
    arrays.combine("sum", tensor.master, step)


def _muon(arrays: Arrays, optimizer: Muon, tensor: WholeTensor, gradient: Array, numbers: UpdateNumbers) -> None:
    momentum = UpdateNumbers("sgd", 1.0, numbers.step, numbers.scale, momentum=optimizer.momentum,
                             nesterov=optimizer.nesterov)
    step = _minus_direction(arrays, tensor, gradient, tensor.states[:1], momentum)
    rows, columns = tensor.shape
    arrays.orthogonalize(step, (rows, columns), optimizer.num_steps)
    arrays.scale(step, numbers.lr * 0.2 * sqrt(max(rows, columns)))
    if numbers.weight_decay:
        arrays.scale(tensor.master, 1 - numbers.lr * numbers.weight_decay)
    arrays.combine("sum", tensor.master, step)
