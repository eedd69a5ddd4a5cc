"""The options of a trainer, checked. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.optim.clip import norm_of
from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.options import Optimizer, ParameterGroup
from hpctrain.optim.precision import Precision
from hpctrain.optim.schedule import Constant, Schedule
from hpctrain.zero.options import Zero

__all__ = ["NON_FINITE", "TrainerOptions"]

NON_FINITE = ("skip", "stop", "ignore")


@dataclass(frozen=True)
class TrainerOptions:
    """How to train; the same on all ranks.

    Attributes:
        optimizer: the update rule.
        groups: parameters with settings of their own.
        schedule: of the learning rate, for groups without one of their own.
        clip_norm: gradients of a larger global norm are scaled down to it; None: off.
        norm_kind: which norm that is: "l2", "l1" or "inf".
        zero: what each rank keeps for its own ranges only.
        precision: the element types; without it all are the model's own.
        loss_scale: of float16; None: dynamic there, off elsewhere.
        non_finite: what to do with a step whose loss or gradient is not finite: "skip" its update, "stop" with
            NonFiniteError, or "ignore" it and update.
        max_skips: with "skip", so many in a row end in NonFiniteError; those that lower a loss scale do not count.
    """

    optimizer: Optimizer
    groups: Sequence[ParameterGroup] = ()
    schedule: Schedule = field(default_factory=Constant)
    clip_norm: float | None = None
    norm_kind: str = "l2"
    zero: Zero = field(default_factory=Zero)
    precision: Precision = field(default_factory=Precision)
    loss_scale: LossScale | None = None
    non_finite: str = "skip"
    max_skips: int = 10

    def __post_init__(self) -> None:
        norm_of(self.norm_kind)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm = {self.clip_norm!r} is not legal; legal are numbers above 0, or None (off)")
        if self.non_finite not in NON_FINITE:
            raise ConfigError(f"non_finite = {self.non_finite!r}{nearest(str(self.non_finite), NON_FINITE)} is not "
                              f"legal; legal are {choices(NON_FINITE)}")
