"""The words in which every collective algorithm is written: steps of sends, receives and finishes.

Owns the data types only. The algorithms are in `ring` and `pairwise`, the proof in `check`, the price in `cost`; the
engine that carries them out is `hpctrain.collectives`.

A collective works on one flat *workspace* of elements, the same size on every rank. A *program* is one rank's list of
steps. All messages of a step are posted together and all are finished before the next step. A message is stored at the
place from which it was sent, so both sides name the same interval [start, stop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpctrain.errors import PlanError

__all__ = ["Action", "CollectivePlan", "Finish", "Program", "Receive", "Send", "Step", "receive", "send"]


@dataclass(frozen=True)
class Send:
    """Sends the elements [start, stop) of the workspace to rank `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Receive:
    """Receives [start, stop) from rank `peer`, and combines it with what is there or (combine=False) replaces it."""

    peer: int
    start: int
    stop: int
    combine: bool = False


@dataclass(frozen=True)
class Finish:
    """[start, stop) holds every rank's contribution: the place to divide for a mean and to round once. Local."""

    start: int
    stop: int


Action = Send | Receive | Finish
Step = tuple[Action, ...]
Program = tuple[Step, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """One collective for `num_ranks` ranks over a workspace cut at `bounds`.

    `operation` says what must hold at the end ("reduce_scatter", "all_gather", "all_reduce" or "broadcast"),
    `algorithm` names the way. `bounds` are ascending offsets from 0 to the number of elements; parts may be empty.
    Except in a broadcast, part r = [bounds[r], bounds[r + 1]) belongs to rank r. `root` matters for the broadcast only.

    Programs are made when asked for, one rank in O(its steps), so a plan of 80,000 ranks costs nothing until read.
    """

    operation: str
    algorithm: str
    num_ranks: int
    bounds: tuple[int, ...]
    make: Callable[[int], Iterator[Step]] = field(repr=False, compare=False)
    root: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlanError(f"num_ranks = {self.num_ranks} must be at least 1")
        if not 0 <= self.root < self.num_ranks:
            raise PlanError(f"root = {self.root} must be in 0..{self.num_ranks - 1}")
        ascending = all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if not self.bounds or self.bounds[0] != 0 or not ascending:
            raise PlanError(f"bounds = {self.bounds[:9]}... must ascend from 0")
        if self.operation != "broadcast" and len(self.bounds) != self.num_ranks + 1:
            raise PlanError(f"bounds has {len(self.bounds)} offsets, must have num_ranks + 1 = {self.num_ranks + 1}")

    @property
    def count(self) -> int:
        """Elements of the workspace."""
        return self.bounds[-1]

    def program(self, rank: int) -> Program:
        """The steps of `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank = {rank} must be in 0..{self.num_ranks - 1}")
        return tuple(self.make(rank))


def send(peer: int, start: int, stop: int) -> tuple[Send, ...]:
    """A send as part of a step, or nothing for an empty interval (the receiver leaves it out by the same rule)."""
    return (Send(peer, start, stop),) if stop > start else ()


def receive(peer: int, start: int, stop: int, *, combine: bool = False) -> tuple[Receive, ...]:
    """A receive as part of a step, or nothing for an empty interval."""
    return (Receive(peer, start, stop, combine),) if stop > start else ()
