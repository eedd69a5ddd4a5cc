"""The loss scale: a factor on the loss that keeps small gradients inside float16, and the rule by which it moves.

Pure: options are a frozen record, the state is another one, and `after` gives the next. Whether a step overflowed is
decided elsewhere, by all ranks together; here it is an argument, the same on every rank.

    hysteresis 2, interval 3, scale in units of the first:

    step        ok  ok  inf inf inf ok  ok  ok  inf inf
    scale after 1   1   1  1/2 1/4 1/4 1/4 1/2 1/2 1/4      the second overflow since the last growth, and each one
    clean       1   2   0   0   0   1   2   0   0   0       after it, backs off; clean steps do not forgive
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["LossScale", "ScaleState", "default_loss_scale"]


@dataclass(frozen=True)
class ScaleState:
    """Where the scale stands: plain numbers, for a checkpoint.

    `clean` counts steps without overflow since the last overflow or growth; `patience` the overflows that are still
    forgiven, the one that backs off included.
    """

    scale: float
    clean: int = 0
    patience: int = 1


@dataclass(frozen=True)
class LossScale:
    """How the loss scale starts and moves; with `dynamic = False` it stays at `initial`.

    After `interval` clean steps in a row it grows. An overflow uses up one of `hysteresis`; once they are used up, each
    overflow multiplies the scale by `backoff`, not below `floor`, until it has grown again (the rule of Megatron-LM's
    grad_scaler; with hysteresis = 1 that of torch.amp.GradScaler).
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 2
    floor: float = 1.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        rules = [("initial", "finite numbers above 0", 0 < self.initial < inf),
                 ("growth", "finite numbers of at least 1", 1 <= self.growth < inf),
                 ("backoff", "numbers in (0, 1)", 0 < self.backoff < 1),
                 ("interval", "whole numbers of at least 1", self.interval >= 1),
                 ("hysteresis", "whole numbers of at least 1", self.hysteresis >= 1),
                 ("floor", f"numbers above 0, at most initial = {self.initial}",
                  not self.dynamic or 0 < self.floor <= self.initial)]
        for name, legal, fine in rules:
            if not fine:
                raise ConfigError(f"loss_scale.{name} = {getattr(self, name)!r} is not legal; legal are {legal}")

    @classmethod
    def fixed(cls, scale: float) -> LossScale:
        """A scale that never moves; 1.0 is off."""
        return cls(initial=scale, dynamic=False)

    def start(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(self.initial, 0, self.hysteresis)

    def after(self, state: ScaleState, overflow: bool) -> ScaleState:
        """The state after one more step. Pure; the same on all ranks if `overflow` is."""
        if not self.dynamic:
            return state
        if overflow:
            patience = max(0, state.patience - 1)
            scale = state.scale if patience else max(state.scale * self.backoff, self.floor)
            return ScaleState(scale, 0, patience)
        if state.clean + 1 < self.interval:
            return ScaleState(state.scale, state.clean + 1, state.patience)
        grown = state.scale * self.growth
        return ScaleState(grown if grown < inf else state.scale, 0, self.hysteresis)

    def save(self, state: ScaleState) -> dict[str, Any]:
        """The state as JSON values."""
        return asdict(state)

    def restore(self, saved: Mapping[str, Any] | None) -> ScaleState:
        """Takes back what `save` gave. None (a run without a scale) starts anew, and a fixed scale stays what it is."""
        if saved is None or not self.dynamic:
            return self.start()
        return ScaleState(float(saved["scale"]), int(saved["clean"]), min(int(saved["patience"]), self.hysteresis))


def default_loss_scale(needed: bool) -> LossScale:
    """What a user gets who did not choose: dynamic where the arithmetic needs one (float16), else off."""
    return LossScale() if needed else LossScale.fixed(1.0)
