"""The words in which every collective algorithm is written: steps of sends, receives and finishes.

Owns the data types only. The algorithms are listed in `algorithms`, the proof is in `check`, the price in `cost`, the
picture in `draw`; the engine that carries them out is `hpctrain.collectives`.

A collective works on one flat *workspace* of elements. A *program* is one rank's list of steps. All messages of a step
are posted together and all are finished before the next step. A message is stored at the place from which it was sent,
so both sides name the same intervals [start, stop). A rank need not have memory for the elements that it never touches:
the workspace of an all-to-all is the whole matrix of blocks, of which a rank has its row at first and its column at the
end.

What is combined changes at the end of a step: a send of the same step still carries the old value. Several values that
a step combines into one interval are added up in the order of ranks, this rank's own value at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.errors import PlanError

__all__ = ["OPERATIONS", "Action", "CollectivePlan", "Finish", "Program", "Receive", "Send", "Step", "parts", "receive",
           "receive_all", "send", "send_all"]

Interval = tuple[int, int]

#: The operations that a plan may carry out.
OPERATIONS = ("broadcast", "scatter", "gather", "reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class Send:
    """Sends the elements [start, stop) of the workspace, and after them the intervals `rest`, to rank `peer`."""

    peer: int
    start: int
    stop: int
    rest: tuple[Interval, ...] = ()

    @property
    def pieces(self) -> tuple[Interval, ...]:
        """The intervals of the message in their order."""
        return ((self.start, self.stop), *self.rest)


@dataclass(frozen=True)
class Receive:
    """Receives [start, stop) from rank `peer`, and combines it with what is there or (combine=False) replaces it.

    `rest` are further intervals of the same message; a message that is combined has none.
    """

    peer: int
    start: int
    stop: int
    combine: bool = False
    rest: tuple[Interval, ...] = ()

    @property
    def pieces(self) -> tuple[Interval, ...]:
        """The intervals of the message in their order."""
        return ((self.start, self.stop), *self.rest)


@dataclass(frozen=True)
class Finish:
    """[start, stop) holds every rank's contribution: the place to divide for a mean and to round once. Local."""

    start: int
    stop: int

    @property
    def pieces(self) -> tuple[Interval, ...]:
        """The one interval."""
        return ((self.start, self.stop),)


Action = Send | Receive | Finish
Step = tuple[Action, ...]
Program = tuple[Step, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """One collective for `num_ranks` ranks over a workspace cut at `bounds`.

    `operation` (one of OPERATIONS) says what must hold at the end, `algorithm` names the way. `bounds` are ascending
    offsets from 0 to the number of elements; parts may be empty. Part r = [bounds[r], bounds[r + 1]) belongs to rank
    r, but in an all-to-all part s * num_ranks + d goes from rank s to rank d, and in a broadcast parts have no owners.
    `root` matters where one rank gives or takes all.

    `direct` promises that nothing but untouched contributions is combined, and only by ranks that finish what they
    combine. So partial sums never travel, and a reduce or reduce_scatter need not write into its input.

    Programs are made when asked for, one rank in O(its steps), so a plan of 80,000 ranks costs nothing until read.
    """

    operation: str
    algorithm: str
    num_ranks: int
    bounds: Sequence[int]
    make: Callable[[int], Iterator[Step]] = field(repr=False, compare=False)
    root: int = 0
    direct: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlanError(f"num_ranks = {self.num_ranks} must be at least 1")
        if not 0 <= self.root < self.num_ranks:
            raise PlanError(f"root = {self.root} must be in 0..{self.num_ranks - 1}")
        if isinstance(self.bounds, tuple):  # any other sequence has seen to it itself
            ascending = all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
            if not self.bounds or self.bounds[0] != 0 or not ascending:
                raise PlanError(f"bounds = {self.bounds[:9]}... must ascend from 0")
        square = self.operation == "all_to_all"
        num_offsets = (self.num_ranks**2 if square else self.num_ranks) + 1
        if self.operation != "broadcast" and len(self.bounds) != num_offsets:
            name = "num_ranks**2 + 1" if square else "num_ranks + 1"
            raise PlanError(f"bounds has {len(self.bounds)} offsets, must have {name} = {num_offsets}")

    @property
    def count(self) -> int:
        """Elements of the workspace."""
        return self.bounds[-1]

    def program(self, rank: int) -> Program:
        """The steps of `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank = {rank} must be in 0..{self.num_ranks - 1}")
        return tuple(self.make(rank))


def send(peer: int, start: int, stop: int) -> Step:
    """A send as part of a step, or nothing for an empty interval (the receiver leaves it out by the same rule)."""
    return (Send(peer, start, stop),) if stop > start else ()


def receive(peer: int, start: int, stop: int, *, combine: bool = False) -> Step:
    """A receive as part of a step, or nothing for an empty interval."""
    return (Receive(peer, start, stop, combine),) if stop > start else ()


def send_all(peer: int, pieces: Sequence[Interval]) -> Step:
    """One message of those of `pieces` that are not empty, or nothing."""
    full = [(start, stop) for start, stop in pieces if stop > start]
    return (Send(peer, *full[0], tuple(full[1:])),) if full else ()


def receive_all(peer: int, pieces: Sequence[Interval]) -> Step:
    """The receive that `send_all` of the same pieces meets."""
    full = [(start, stop) for start, stop in pieces if stop > start]
    return (Receive(peer, *full[0], rest=tuple(full[1:])),) if full else ()


def parts(bounds: Sequence[int], first: int, num_parts: int) -> tuple[Interval, ...]:
    """The intervals of parts first, first + 1, ..., first + num_parts - 1, counted round the end: one or two."""
    p = len(bounds) - 1
    first %= p
    last = first + num_parts
    if last <= p:
        return ((bounds[first], bounds[last]),)
    return ((bounds[first], bounds[p]), (bounds[0], bounds[last - p]))
