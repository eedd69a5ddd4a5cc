"""The optimizers as options: what a user writes, as frozen records. The arithmetic is in `Arrays`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hpctrain.errors import ConfigError
from hpctrain.optim.schedule import Constant, Schedule

__all__ = ["SGD", "AdamW", "Optimizer", "ParameterGroup"]


def _check(name: str, value: float, legal: str, fine: bool) -> None:
    if not fine:
        raise ConfigError(f"{name} = {value!r} is not legal; legal are {legal}")


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), as torch.optim.AdamW computes it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        _check("lr", self.lr, "numbers of at least 0", self.lr >= 0)
        for beta in self.betas:
            _check("betas", beta, "numbers in [0, 1)", 0 <= beta < 1)
        _check("eps", self.eps, "numbers of at least 0", self.eps >= 0)
        _check("weight_decay", self.weight_decay, "numbers of at least 0", self.weight_decay >= 0)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with (Nesterov) momentum and L2 weight decay, as torch.optim.SGD computes it."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, "numbers of at least 0", self.lr >= 0)
        _check("momentum", self.momentum, "numbers of at least 0", self.momentum >= 0)
        _check("weight_decay", self.weight_decay, "numbers of at least 0", self.weight_decay >= 0)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov = True needs momentum > 0")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors: none without momentum."""
        return ("momentum",) if self.momentum else ()


Optimizer = AdamW | SGD


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with settings of their own, chosen by glob patterns over names: the first group that matches wins.

    None means: as the optimizer says. A group may match nothing; it keeps its place and its schedule. Weight decay is
    never applied to a parameter whose placement says `decay=False`.
    """

    name: str
    match: tuple[str, ...] = ()
    lr: float | None = None
    weight_decay: float | None = None
    schedule: Schedule = field(default_factory=Constant)
