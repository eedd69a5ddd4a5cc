"""How the ranks of a trainer share the work: who holds the same parameters, who decides, who runs what.

Owns the protocol and its plain case, in which every rank has the whole model. Knows no schedule and no update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hpctrain.collectives import Group
from hpctrain.runtime.decision import Decider
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.options import TrainerOptions
from hpctrain.runtime.passes import Passes

__all__ = ["DataParallel", "Parallel", "PassesOf"]


class PassesOf(Protocol):
    """See `passes.Passes`, the plain case."""

    unused: frozenset[str]

    def train(self, batches: Sequence[Any], loss_scale: float) -> tuple[float, float]:
        """Forward and backward; gradients are reduced. Gives (loss_sum, weight) that this rank counts."""

    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """Forward only."""

    def search(self, batches: Sequence[Any], loss_scale: float) -> str:
        """Where the first value that is not finite comes up on this rank."""


class Parallel(Protocol):
    """What a trainer asks.

    Attributes:
        world: the ranks that decide together about a step.
        data: those of them that hold the same parameters as this one.
        mesh: the axes of the world and their lengths.
        elsewhere: parameters of this rank that another rank, beside the data axis, counts in norms and saves.
    """

    world: Group
    data: Group
    mesh: Mapping[str, int]
    elsewhere: frozenset[str]

    def check(self, options: TrainerOptions) -> None:
        """Raises UnsupportedError for options that do not go together with this. Local."""

    def passes(self, flat: FlatModel, decider: Decider, part: Callable[[str], None]) -> PassesOf:
        """The passes of a trainer. Local."""

    def joined(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Small values by name, of all ranks that together have one model. Collective over the world."""


class DataParallel:
    """Every rank has the whole model."""

    elsewhere: frozenset[str] = frozenset()

    def __init__(self, world: Group) -> None:
        self.world = self.data = world
        self.mesh: Mapping[str, int] = {"data": world.size}

    def check(self, options: TrainerOptions) -> None:
        """All options are legal."""

    def passes(self, flat: FlatModel, decider: Decider, part: Callable[[str], None]) -> Passes:
        """Micro-batch by micro-batch."""
        return Passes(flat, decider, part)

    def joined(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's own are all there are."""
        return dict(mine)
