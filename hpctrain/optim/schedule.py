"""Learning-rate schedules: a factor on the learning rate as a function of the number of applied updates.

Schedules count updates and nothing else: not micro-batches, not ranks, not skipped steps. They are frozen records; the
one with a memory (`Plateau`) keeps it in a dict that the checkpoint carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, inf, pi
from typing import Any, Protocol

from hpctrain.errors import ConfigError

__all__ = ["Constant", "Plateau", "Schedule", "WarmupCosine", "WarmupLinear"]


class Schedule(Protocol):
    """`factor` multiplies the group's lr; `observe` takes a measured value (a validation loss) into `state`."""

    def factor(self, update: int, state: dict[str, Any]) -> float:
        """The factor for the update after `update` applied ones (0 for the first). Pure."""

    def observe(self, value: float, state: dict[str, Any]) -> None:
        """Takes in a measurement, the same on every rank; most schedules ignore it."""


class _NoMemory:
    """A schedule that does not look at measurements."""

    def observe(self, value: float, state: dict[str, Any]) -> None:
        """Ignores the value."""


@dataclass(frozen=True)
class Constant(_NoMemory):
    """Always 1."""

    def factor(self, update: int, state: dict[str, Any]) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class _Warmup(_NoMemory):
    """Rises linearly over `warmup` updates (the first one gets 1/warmup), then falls until `total` to `floor`."""

    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup <= self.total or self.total < 1:
            raise ConfigError(f"schedule: warmup = {self.warmup} and total = {self.total} must fulfil "
                              "0 <= warmup <= total and total >= 1")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"schedule: floor = {self.floor} must be in [0, 1]")

    def factor(self, update: int, state: dict[str, Any]) -> float:
        """The factor; `floor` from update `total` on."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        progress = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (1 - self.floor) * self._fall(progress)

    def _fall(self, progress: float) -> float:
        raise AssertionError("a shape is chosen by a subclass")


@dataclass(frozen=True)
class WarmupCosine(_Warmup):
    """Warm-up, then half a cosine from 1 to `floor` (arXiv 1608.03983 without restarts)."""

    floor: float = 0.1

    def _fall(self, progress: float) -> float:
        return 0.5 * (1 + cos(pi * progress))


@dataclass(frozen=True)
class WarmupLinear(_Warmup):
    """Warm-up, then a straight line from 1 to `floor`."""

    def _fall(self, progress: float) -> float:
        return 1 - progress


@dataclass(frozen=True)
class Plateau:
    """Multiplies by `shrink` each time the observed value has not improved for more than `patience` observations."""

    shrink: float = 0.1
    patience: int = 10
    floor: float = 0.0

    def factor(self, update: int, state: dict[str, Any]) -> float:
        """The present factor, whatever the update."""
        return max(self.floor, state.get("factor", 1.0))

    def observe(self, value: float, state: dict[str, Any]) -> None:
        """Counts an observation without improvement, or notes the improvement."""
        if value < state.get("best", inf):
            state.update(best=value, bad=0)
            return
        state["bad"] = state.get("bad", 0) + 1
        if state["bad"] > self.patience:
            state.update(factor=state.get("factor", 1.0) * self.shrink, bad=0)
