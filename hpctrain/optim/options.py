"""The optimizers as options: what a user writes, as frozen records.

Each says how it wants to be run: `slots` names its states, `ownership` what a rank must own of a tensor, `numbers` its
element-wise arithmetic, which is in `Arrays`. Updates of whole tensors are in `whole_tensors`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hpctrain.contracts import UpdateNumbers
from hpctrain.errors import ConfigError
from hpctrain.optim.schedule import Constant, Schedule

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Muon", "Optimizer", "Ownership", "ParameterGroup"]

#: What a rank must own of a tensor to update it: any elements, or the whole.
Ownership = Literal["element", "tensor"]


def _check(name: str, value: float, legal: str, fine: bool) -> None:
    if not fine:
        raise ConfigError(f"{name} = {value!r} is not legal; legal are {legal}")


@dataclass(frozen=True)
class _Adam:
    """The options that all of Adam's relatives share."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    ownership: ClassVar[Ownership] = "element"
    rule: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        _check("lr", self.lr, "numbers of at least 0", self.lr >= 0)
        for beta in self.betas:
            _check("betas", beta, "numbers in [0, 1)", 0 <= beta < 1)
        _check("eps", self.eps, "numbers of at least 0", self.eps >= 0)
        _check("weight_decay", self.weight_decay, "numbers of at least 0", self.weight_decay >= 0)

    def numbers(self, *, lr: float, weight_decay: float, step: int, scale: float) -> UpdateNumbers:
        """The element-wise arithmetic of update `step` (from 1)."""
        return UpdateNumbers(self.rule, lr, step, scale, weight_decay, self.betas[0], self.betas[1], self.eps)


@dataclass(frozen=True)
class AdamW(_Adam):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), as torch.optim.AdamW computes it."""

    weight_decay: float = 0.01

    rule: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class Adam(_Adam):
    """Adam (arXiv 1412.6980); weight decay is L2, added to the gradient, as torch.optim.Adam computes it."""


@dataclass(frozen=True)
class LAMB(_Adam):
    """Layer-wise adaptive moments (arXiv 1904.00962, algorithm 2): a tensor's step is lr times as long as the tensor.

    The step of a tensor x is lr * |x| / |u| * u with u = Adam's direction + weight_decay * x and L2 norms over the
    whole tensor; the ratio is 1 where one of the norms is 0.
    """

    eps: float = 1e-6
    weight_decay: float = 0.01

    ownership: ClassVar[Ownership] = "tensor"


@dataclass(frozen=True)
class Muon(_Adam):
    """Momentum made orthogonal, for matrices (K. Jordan et al. 2024); AdamW with the same lr for all other tensors.

    The step of a matrix is lr * 0.2 * sqrt(max(rows, columns)) * orthogonalized(Nesterov momentum), which has about
    the root mean square of AdamW's step (arXiv 2502.16982), with decoupled weight decay. Embeddings and heads are
    better off with AdamW: `adamw` are glob patterns of matrices that get it. `exp_avg` holds the momentum of a matrix;
    its `exp_avg_sq` stays zero.
    """

    weight_decay: float = 0.01
    momentum: float = 0.95
    nesterov: bool = True
    num_steps: int = 5
    adamw: tuple[str, ...] = ("*embed*", "*place.*", "*wte*", "*wpe*", "*head.*")

    ownership: ClassVar[Ownership] = "tensor"
    rule: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum, "numbers in [0, 1)", 0 <= self.momentum < 1)
        _check("num_steps", self.num_steps, "whole numbers of at least 1", self.num_steps >= 1)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with (Nesterov) momentum and L2 weight decay, as torch.optim.SGD computes it."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    ownership: ClassVar[Ownership] = "element"

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

    def numbers(self, *, lr: float, weight_decay: float, step: int, scale: float) -> UpdateNumbers:
        """The element-wise arithmetic of update `step` (from 1)."""
        return UpdateNumbers("sgd", lr, step, scale, weight_decay, momentum=self.momentum, nesterov=self.nesterov)


Optimizer = AdamW | Adam | LAMB | Muon | SGD


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
