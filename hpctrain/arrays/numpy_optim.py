"""Optimizer arithmetic on NumPy arrays, in blocks that fit the cache: one pass over memory.

Owns the element-wise updates and the orthogonalisation of a matrix. Knows numbers, not what an optimizer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.contracts import Array, UpdateNumbers

__all__ = ["orthogonalize", "update"]

_BLOCK = 16 * 1024  # elements; seven float32 blocks of this size fit a core's second-level cache


def update(numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
           states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
    """See `hpctrain.contracts.Arrays.update`."""
    rule = _sgd if numbers.rule == "sgd" else _adam
    columns = [masters, gradients, *states, *([copies] if copies else [])]
    for whole in zip(*columns, strict=True):
        scratch = np.empty((3, min(_BLOCK, whole[0].size)), whole[0].dtype)
        for p, g, *rest in zip(*map(_blocks, whole), strict=True):
            scaled, t, u = scratch[:, : p.size]
            np.multiply(g, numbers.scale, out=scaled, dtype=p.dtype, casting="unsafe")
            np.copyto(g, scaled, casting="unsafe")
            rule(numbers, p, scaled, rest, t, u)
            if copies:
                np.copyto(rest[-1], p, casting="unsafe")


def _adam(numbers: UpdateNumbers, p: Array, g: Array, states: list[Array], t: Array, u: Array) -> None:
    """p (1 - lr decay) - step_size m / (sqrt(v) / root + eps), the decay in g instead for "adam"."""
    m, v = states[:2]
    if numbers.weight_decay and numbers.rule == "adam":
        np.multiply(p, numbers.weight_decay, out=u)
        g += u
    elif numbers.weight_decay:
        p *= 1 - numbers.lr * numbers.weight_decay
    m *= numbers.beta1
    np.multiply(g, 1 - numbers.beta1, out=u)
    m += u
    np.multiply(g, g, out=t)
    t *= 1 - numbers.beta2
    v *= numbers.beta2
    v += t
    np.sqrt(v, out=t)
    t *= 1 / math.sqrt(1 - numbers.beta2**numbers.step)
    t += numbers.eps
    np.divide(m, t, out=t)
    t *= numbers.lr / (1 - numbers.beta1**numbers.step)
    p -= t


def _sgd(numbers: UpdateNumbers, p: Array, g: Array, states: list[Array], t: Array, u: Array) -> None:
    if numbers.weight_decay:
        np.multiply(p, numbers.weight_decay, out=u)
        g += u
    if numbers.momentum:
        b = states[0]
        b *= numbers.momentum
        b += g
        if numbers.nesterov:
            np.multiply(b, numbers.momentum, out=u)
            g += u
        else:
            g = b
    np.multiply(g, numbers.lr, out=t)
    p -= t


def orthogonalize(matrix: Array, shape: tuple[int, int], num_steps: int) -> None:
    """See `hpctrain.contracts.Arrays.orthogonalize`."""
    x = matrix.reshape(shape)
    x = x.T if shape[0] > shape[1] else x
    x = x / max(float(np.linalg.norm(x)), 1e-7)
    for _ in range(num_steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    matrix.reshape(shape)[...] = x.T if shape[0] > shape[1] else x


def _blocks(array: Array) -> Iterator[Array]:
    return (array[start : start + _BLOCK] for start in range(0, array.size, _BLOCK))
