"""Losses in NumPy: sums over samples, with the number of samples as weight, and the gradient of the sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.adapters.numpy.layers import Floats

__all__ = ["cross_entropy", "squared_error"]


def cross_entropy(logits: Floats, targets: Any) -> tuple[float, float, Floats]:
    """Summed -log softmax(logits)[target] in nats: logits (rows, classes), targets (rows,) integers.

    Returns (loss_sum, weight = rows, gradient (rows, classes)).
    """
    shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    loss = float(np.sum(np.log(sums[:, 0]) - shifted[rows, targets]))
    gradient = exponentials / sums
    gradient[rows, targets] -= 1
    return loss, float(len(targets)), gradient


def squared_error(outputs: Floats, targets: Floats) -> tuple[float, float, Floats]:
    """Summed (output - target)^2 / 2: both (rows, width). Returns (loss_sum, weight = rows, gradient)."""
    difference = outputs - targets
    return 0.5 * float(np.sum(difference * difference)), float(len(targets)), difference
