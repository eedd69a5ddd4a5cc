"""Proves a collective plan right, for all ranks at once, without running it.

Owns what "right" means for each operation. An element's value is written as the set of contributions that went into
it, so a plan that passes is right for every input, and the work does not grow with the number of elements: only the
places where some message begins or ends matter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from hpctrain.errors import PlanError
from hpctrain.plan.play import Entered, Met, play
from hpctrain.plan.steps import CollectivePlan, Finish, Receive, Send, Step

__all__ = ["check"]


def check(plan: CollectivePlan) -> None:
    """Raises PlanError, naming rank, step and elements, unless the plan is right in every respect.

    - every send meets a receive of the same elements, and every rank comes to its end, however fast each is, even
      where a send completes only when it is received (no deadlock);
    - within a step no element is received into while it is sent, or received twice unless both receives combine;
      between two ranks there is at most one message each way;
    - no rank sends an element that it does not have, none adds a contribution twice or replaces what it has summed;
    - each reduced element is finished once, by one rank, with the contribution of every rank in it, and not changed
      afterwards;
    - at the end, each rank holds what the operation promises: its own part of the sum (reduce_scatter), the whole sum
      (all_reduce), every rank's part (all_gather), the root's elements (broadcast).
    """
    _Board(plan).run()


class _Board:
    """What every rank's workspace holds, in cells: the pieces between two neighbouring borders of any message.

    A value is a bit mask: bit r is rank r's contribution, bit p says finished; 0 is an element that is not there yet.
    """

    def __init__(self, plan: CollectivePlan) -> None:
        self.plan = plan
        p = plan.num_ranks
        self.finished = 1 << p
        self.complete = (1 << p) - 1
        programs = [plan.program(rank) for rank in range(p)]
        borders = set(plan.bounds)
        for program in programs:
            for step in program:
                for action in step:
                    borders |= {action.start, action.stop}
        self.borders = sorted(borders)
        self.index = {offset: i for i, offset in enumerate(self.borders)}
        for rank, program in enumerate(programs):
            for number, step in enumerate(program):
                self._check_step(rank, number, step)
        self.owners = self._owners()
        self.cells = [self._at_start(rank) for rank in range(p)]

    def run(self) -> None:
        for event in play(self.plan):
            if isinstance(event, Met):
                self._move(event)
            else:
                self._finish(event)
        for rank in range(self.plan.num_ranks):
            self._check_end(rank)

    def _owners(self) -> list[int]:
        """The rank whose part each cell lies in."""
        if self.plan.operation == "broadcast":
            return [self.plan.root] * (len(self.borders) - 1)
        owners = []
        for rank in range(self.plan.num_ranks):
            first, last = self.index[self.plan.bounds[rank]], self.index[self.plan.bounds[rank + 1]]
            owners += [rank] * (last - first)
        return owners

    def _at_start(self, rank: int) -> list[int]:
        if self.plan.operation in ("reduce_scatter", "all_reduce"):
            return [1 << rank] * len(self.owners)
        return [1 << rank if owner == rank else 0 for owner in self.owners]

    def _check_step(self, rank: int, number: int, step: Step) -> None:
        where = f"rank {rank}, step {number}"
        for action in step:
            if not 0 <= action.start < action.stop <= self.plan.count:
                raise PlanError(f"{where}: {action} must name elements of [0, {self.plan.count}), and at least one")
        for a, b in combinations(step, 2):
            overlap = max(a.start, b.start) < min(a.stop, b.stop)
            if isinstance(a, Finish) or isinstance(b, Finish):
                if overlap:
                    raise PlanError(f"{where}: {a} and {b} touch the same elements")
                continue
            if type(a) is type(b) and a.peer == b.peer:
                raise PlanError(f"{where}: {a} and {b} could be taken for one another; use two steps")
            reads_only = isinstance(a, Send) and isinstance(b, Send)
            adds_only = isinstance(a, Receive) and isinstance(b, Receive) and a.combine and b.combine
            if overlap and not reads_only and not adds_only:
                raise PlanError(f"{where}: {a} and {b} touch the same elements")

    def _move(self, event: Met) -> None:
        where = f"rank {event.destination}, step {event.destination_step}"
        first, last = self.index[event.send.start], self.index[event.send.stop]
        for cell in range(first, last):
            arriving, present = self.cells[event.source][cell], self.cells[event.destination][cell]
            if not arriving:
                raise PlanError(
                    f"rank {event.source}, step {event.source_step} sends {self._name(cell)}, which it does not have"
                )
            if event.receive.combine:
                if not present:
                    raise PlanError(f"{where} adds to {self._name(cell)}, which it does not have")
                if arriving & present:
                    raise PlanError(f"{where} adds a contribution twice to {self._name(cell)}")
                if (arriving | present) & self.finished:
                    raise PlanError(f"{where} adds to {self._name(cell)}, which is finished")
                arriving |= present
            elif present & self.finished:
                raise PlanError(f"{where} replaces {self._name(cell)}, which is finished")
            self.cells[event.destination][cell] = arriving

    def _finish(self, event: Entered) -> None:
        for finish in event.finishes:
            for cell in range(self.index[finish.start], self.index[finish.stop]):
                if self.cells[event.rank][cell] != self.complete:
                    raise PlanError(
                        f"rank {event.rank}, step {event.step} finishes {self._name(cell)}, which "
                        f"{self._describe(self.cells[event.rank][cell])}"
                    )
                self.cells[event.rank][cell] |= self.finished

    def _check_end(self, rank: int) -> None:
        expected: Callable[[int], int | None] = {
            "reduce_scatter": lambda owner: self.complete | self.finished if owner == rank else None,
            "all_reduce": lambda owner: self.complete | self.finished,
            "all_gather": lambda owner: 1 << owner,
            "broadcast": lambda owner: 1 << owner,
        }[self.plan.operation]
        for cell, owner in enumerate(self.owners):
            wanted = expected(owner)
            if wanted is not None and self.cells[rank][cell] != wanted:
                held = self._describe(self.cells[rank][cell])
                must = self._describe(wanted)
                raise PlanError(f"at the end {self._name(cell)} on rank {rank} {held}; right is: {must}")

    def _name(self, cell: int) -> str:
        return f"elements [{self.borders[cell]}, {self.borders[cell + 1]})"

    def _describe(self, value: int) -> str:
        ranks = [rank for rank in range(self.plan.num_ranks) if value >> rank & 1]
        return f"holds the contributions of ranks {ranks}" + (", finished" if value & self.finished else "")
