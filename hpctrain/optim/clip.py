"""The gradient's norm, and clipping by it, folded into the one factor that the update multiplies gradients by.

    memory   sums over all samples, times the loss scale        each rank measures own ranges only: every logical
    partial  one number a rank                                  element is counted once, padding is zero
    total    partials of all ranks, added or their maximum
    norm     of total / (global weight * loss scale)

The update gets `scale = clip / (weight * loss scale)`, so no pass over memory is spent on dividing, unscaling or
clipping. Inf and nan come through, so that the same number tells of an overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isnan, nan, sqrt

from hpctrain.contracts import Array, Arrays
from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["NORMS", "Norm", "gradient_norm", "norm_of", "update_scale"]


@dataclass(frozen=True)
class Norm:
    """One kind of norm. `combine` ("sum" or "max", see `dtypes.OPERATIONS`) joins the partials of ranges and ranks."""

    name: str
    combine: str
    measure: Callable[[Arrays, Array], float]
    root: Callable[[float], float]

    def partial(self, arrays: Arrays, ranges: Iterable[Array]) -> float:
        """This rank's part, from flat ranges of summed gradients: one pass. 0.0 without any. Local."""
        values = [self.measure(arrays, array) for array in ranges]
        if self.combine == "sum":
            return sum(values)
        return nan if any(map(isnan, values)) else max(values, default=0.0)


def _root(total: float) -> float:
    return sqrt(total) if total >= 0 else nan


#: By the names that a user writes.
NORMS: dict[str, Norm] = {
    "l2": Norm("l2", "sum", lambda arrays, array: arrays.sum_of_squares(array), _root),
    "l1": Norm("l1", "sum", lambda arrays, array: arrays.abs_sum(array), float),
    "inf": Norm("inf", "max", lambda arrays, array: arrays.abs_max(array), float),
}


def norm_of(name: str) -> Norm:
    """The norm of that name. Raises ConfigError that lists the known ones."""
    if name not in NORMS:
        raise ConfigError(f"norm_kind = {name!r} is not legal; legal are {choices(NORMS)}{nearest(str(name), NORMS)}")
    return NORMS[name]


def gradient_norm(total: float, divisor: float, norm: Norm = NORMS["l2"]) -> float:
    """Norm of the step's gradient before clipping, from the combined partials; `divisor` = weight * loss scale."""
    return norm.root(total) / divisor


def update_scale(norm: float, divisor: float, clip_norm: float | None) -> float:
    """The factor on the gradients in memory: 1 / (weight * loss scale), smaller where the norm exceeds `clip_norm`."""
    if clip_norm is None or norm <= clip_norm:
        return 1.0 / divisor
    return clip_norm / norm / divisor
