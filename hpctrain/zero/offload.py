"""The options of offload: which states live on a disk of the node, and whether updates come one step late."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["PLACES", "WINDOW_BYTES", "Offload", "offload_from"]

PLACES = (None, "host", "disk")
WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class Offload:
    """Where a rank keeps what it owns: `hpctrain.Offload(states="disk", directory="/local/scratch")`.

    See docs/offload.md. None and "host" are the same on a machine whose ranks compute in host memory.

    Attributes:
        states: the optimizer's states, and the master parameters where there are any.
        gradients: the sums that the update reads; "disk" needs zero.stage 2 or 3 with zero.accumulate = "reduce".
        parameters: "disk" needs zero.stage 3 with zero.share "none".
        directory: on a local disk of each node. A rank has one file there, without a name, which vanishes with it.
        window_bytes: so much of a rank's file is in memory during an update, but at least one chunk (see there).
        delay: the update from a step's gradients runs while the next step computes (arXiv 2101.06840, section 5.2).
        delay_start: the number of ordinary updates before.
    """

    states: str | None = None
    gradients: str | None = None
    parameters: str | None = None
    directory: str | os.PathLike[str] | None = None
    window_bytes: int = WINDOW_BYTES
    delay: bool = False
    delay_start: int = 40

    def __post_init__(self) -> None:
        for name in ("states", "gradients", "parameters"):
            value = getattr(self, name)
            if value not in PLACES:
                raise ConfigError(f"zero.offload.{name} = {value!r}{nearest(str(value), map(str, PLACES))} is not "
                                  f"legal; legal are {choices(PLACES)}")
        if self.on_disk and not self.directory:
            raise ConfigError(f"zero.offload.{min(self.on_disk)} = 'disk' needs zero.offload.directory: a directory on "
                              "a local disk of each node")
        if not isinstance(self.delay, bool):
            raise ConfigError(f"zero.offload.delay = {self.delay!r} is not legal; legal are True or False")
        for name, low in (("window_bytes", 1), ("delay_start", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"zero.offload.{name} = {getattr(self, name)!r} is not legal; legal are numbers of "
                                  f"at least {low}")

    @property
    def on_disk(self) -> frozenset[str]:
        """What lives on disk: of "states", "gradients", "parameters"."""
        return frozenset(name for name in ("states", "gradients", "parameters") if getattr(self, name) == "disk")

    def check(self, stage: int, share: str, accumulate: str) -> None:
        """Raises ConfigError where the other options of `Zero` leave nothing to offload."""
        if self.gradients == "disk" and (stage < 2 or accumulate != "reduce"):
            raise ConfigError("zero.offload.gradients = 'disk' needs zero.stage = 2 or 3 with zero.accumulate = "
                              f"'reduce', not zero.stage = {stage} with zero.accumulate = {accumulate!r}: otherwise "
                              "each rank's whole gradient must be in memory")
        if self.parameters == "disk" and (stage < 3 or share != "none"):
            raise ConfigError("zero.offload.parameters = 'disk' needs zero.stage = 3 with zero.share = 'none', not "
                              f"zero.stage = {stage} with zero.share = {share!r}: otherwise the model computes on all "
                              "of them all the time")


def offload_from(options: Offload | Mapping[str, Any]) -> Offload:
    """The record itself, or the one with these options. Raises ConfigError for an unknown name."""
    if isinstance(options, Offload):
        return options
    legal = [field.name for field in fields(Offload)]
    for name in options:
        if name not in legal:
            raise ConfigError(f"option zero.offload.{name} is unknown{nearest(name, legal)}; legal are "
                              f"{choices(legal)}")
    return Offload(**options)
