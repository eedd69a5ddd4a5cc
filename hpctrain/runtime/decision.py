"""The joint decision of a step: all ranks add up a few numbers, and so see the same loss, norm and verdict.

Owns these numbers and what they mean. Must not know models, nor who computed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan

from hpctrain.collectives import Group
from hpctrain.contracts import Arrays
from hpctrain.optim.clip import Norm, gradient_norm

__all__ = ["Decider", "Decision"]


@dataclass(frozen=True)
class Decision:
    """What all ranks know of a step; the same bits on each. `norm` is of the step's gradient before clipping.

    `skipped` tells why nothing should be applied: "no data", "not finite", or "".
    """

    loss_sum: float
    weight: float
    norm: float
    stop: bool
    skipped: str

    @property
    def loss(self) -> float:
        """Global sum of loss terms / global weight."""
        return self.loss_sum / self.weight if self.weight else nan


class Decider:
    """Reduces the numbers of a step over the data axis. All methods are collective over the group."""

    def __init__(self, group: Group, arrays: Arrays, norm: Norm) -> None:
        self._group, self._arrays, self._norm = group, arrays, norm
        self._numbers = arrays.zeros(4, "float64")

    def decide(self, loss_sum: float, weight: float, partial: float, stop: bool, loss_scale: float) -> Decision:
        """From this rank's sums: loss terms, weight, part of the norm of the gradients in memory, stop signal.

        No rank gets beyond this before all have run their last backward, so that from here on parameters may change.
        """
        if self._norm.combine == "sum":
            loss_sum, weight, total, stops = self.add(loss_sum, weight, partial, float(stop))
        else:
            loss_sum, weight, stops = self.add(loss_sum, weight, float(stop))
            (total,) = self._reduce([partial], self._norm.combine)
        norm = gradient_norm(total, weight * loss_scale, self._norm) if weight else nan
        skipped = "no data" if weight == 0 else "" if isfinite(norm) and isfinite(loss_sum) else "not finite"
        return Decision(loss_sum, weight, norm, stops > 0, skipped)

    def add(self, *values: float) -> list[float]:
        """The sums of a few numbers."""
        return self._reduce(values, "sum")

    def largest(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        return int(self._reduce([float(value)], "max")[0])

    def _reduce(self, values: list[float] | tuple[float, ...], operation: str) -> list[float]:
        numbers = self._numbers[: len(values)]
        for i, value in enumerate(values):
            self._arrays.fill(numbers[i : i + 1], value)
        self._group.all_reduce(numbers, operation)
        return [float(x) for x in numbers]
