"""Optimizer arithmetic on NumPy arrays, in blocks that fit the cache: one pass over memory.

Owns the element-wise updates and the orthogonalisation of a matrix. Knows numbers, not what an optimizer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.contracts import Array, UpdateNumbers

__all__ = ["orthogonalize", "update"]

_BLOCK = 32 * 1024  # elements; seven float32 blocks of this size fit a core's second-level cache


def update(numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
           states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
    """See `hpctrain.contracts.Arrays.update`."""
    rule = _sgd if numbers.rule == "sgd" else _adam
    columns = [masters, gradients, *states, *([copies] if copies else [])]
    for whole in zip(*columns, strict=True):
        scratch = np.empty((3, min(_BLOCK, whole[0].size)), whole[0].dtype)
        for p, g, *rest in zip(*map(_blocks, whole), strict=True):
            w, t, u = scratch[:, : p.size]
            if g.dtype == p.dtype:
                if numbers.scale != 1.0:
                    g *= numbers.scale
                rule(numbers, p, g, rest, (w, t, u))
            else:
                np.multiply(g, numbers.scale, out=w, dtype=p.dtype, casting="unsafe")
                np.copyto(g, w, casting="unsafe")
                rule(numbers, p, w, rest, (w, t, u))
            if copies:
                np.copyto(rest[-1], p, casting="unsafe")


def _adam(numbers: UpdateNumbers, p: Array, g: Array, states: list[Array], scratch: tuple[Array, Array, Array]) -> None:
    """p (1 - lr decay) - step_size m / (sqrt(v) / root + eps), the decay in g instead for "adam". `g` stays."""
    m, v = states[:2]
    w, t, u = scratch
    if numbers.weight_decay and numbers.rule == "adam":
        np.multiply(p, numbers.weight_decay, out=u)
        g = np.add(g, u, out=w)
    elif numbers.weight_decay:
        p *= 1 - numbers.lr * numbers.weight_decay
    m *= numbers.beta1
    np.multiply(g, 1 - numbers.beta1, out=u)
    m += u
    np.multiply(g, g, out=t)
    t *= 1 - numbers.beta2
    v *= numbers.beta2
    v += t
    root = math.sqrt(1 - numbers.beta2**numbers.step)
    np.sqrt(v, out=t)
    t += numbers.eps * root
    np.divide(m, t, out=t)
    t *= numbers.lr * root / (1 - numbers.beta1**numbers.step)
    p -= t


def _sgd(numbers: UpdateNumbers, p: Array, g: Array, states: list[Array], scratch: tuple[Array, Array, Array]) -> None:
    """p - lr (g + momentum buffer if nesterov, else buffer), where g has the decay. `g` stays."""
    w, t, u = scratch
    if numbers.weight_decay:
        np.multiply(p, numbers.weight_decay, out=u)
        g = np.add(g, u, out=w)
    if numbers.momentum:
        b = states[0]
        b *= numbers.momentum
        b += g
        g = np.add(g, np.multiply(b, numbers.momentum, out=u), out=t) if numbers.nesterov else b
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
