"""Clipping by global norm, folded into the one factor that the update multiplies gradients by.

Gradients in memory are sums over all samples. The step's gradient is their sum divided by the global weight, so the
update gets `scale = clip / weight` and no pass over memory is spent on either.
"""

from __future__ import annotations

from math import sqrt

__all__ = ["gradient_norm", "update_scale"]


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """L2 norm of the step's gradient, before clipping, from the sum of squares of the summed gradient."""
    return sqrt(sum_of_squares) / weight


def update_scale(norm: float, weight: float, clip_norm: float | None) -> float:
    """The factor on the summed gradient: 1/weight, smaller where the norm exceeds `clip_norm`."""
    if clip_norm is None or norm <= clip_norm:
        return 1.0 / weight
    return clip_norm / norm / weight
