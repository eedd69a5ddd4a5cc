"""Proves a collective plan right, for all ranks at once, without running it.

Owns what "right" means for each operation. An element's value is written as the sum that was formed, so a plan that
passes is right for every input, and the work does not grow with the number of elements: only the places where some
message begins or ends matter.
"""

from __future__ import annotations

from itertools import combinations

from hpctrain.errors import PlanError
from hpctrain.plan.play import Entered, Met, play
from hpctrain.plan.steps import CollectivePlan, Finish, Program, Receive, Send, Step
from hpctrain.plan.sums import Sums

__all__ = ["check"]


def check(plan: CollectivePlan) -> None:
    """Raises PlanError, naming rank, step and elements, unless the plan is right in every respect.

    - every send meets a receive of the same elements, and every rank comes to its end, however fast each is, even
      where a send completes only when it is received (no deadlock);
    - within a step no element is stored into while it is sent, or received twice unless both receives combine one
      interval; between two ranks there is at most one message each way;
    - no rank sends an element that it does not have, none adds a contribution twice or replaces what it has summed;
    - what is finished has the contribution of every rank in it, once, and is not changed afterwards; all ranks that
      end with an element of a sum have added it up in the same way, so that they have the same bits;
    - a plan that calls itself direct combines untouched contributions only, and finishes whatever it combines;
    - at the end, each rank holds what the operation promises: its own part of the sum (reduce_scatter), the whole sum
      (all_reduce; reduce: the root), every rank's part (all_gather; gather: the root), the root's elements (broadcast;
      scatter: its own part of them), every rank's block for it (all_to_all).
    """
    _Board(plan).run()


class _Board:
    """What every rank's workspace holds, in cells: the pieces between two neighbouring borders of any message.

    `cells[rank][cell]` is a value of `sums`; 0 is an element that is not there. `waiting[rank]` is what has come in the
    rank's current step to be combined: cell -> [(peer, value)].
    """

    def __init__(self, plan: CollectivePlan) -> None:
        self.plan = plan
        p = plan.num_ranks
        self.sums = Sums(p)
        programs = [plan.program(rank) for rank in range(p)]
        self.borders = _borders(plan, programs)
        self.index = {offset: i for i, offset in enumerate(self.borders)}
        for rank, program in enumerate(programs):
            for number, step in enumerate(program):
                _check_step(f"rank {rank}, step {number}", step, plan.count)
        self.owners = self._owners()
        self.cells = [self._at_start(rank) for rank in range(p)]
        self.waiting: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(p)]

    def run(self) -> None:
        step = [0] * self.plan.num_ranks
        for event in play(self.plan):
            if isinstance(event, Met):
                self._move(event)
            else:
                self._combine(event.rank, event.step - 1)
                self._finish(event)
                step[event.rank] = event.step
        for rank in range(self.plan.num_ranks):
            self._combine(rank, step[rank])
            self._check_end(rank)

    def _owners(self) -> list[int]:
        """The part that each cell lies in."""
        if self.plan.operation == "broadcast":
            return [self.plan.root] * (len(self.borders) - 1)
        owners = []
        for part in range(len(self.plan.bounds) - 1):
            first, last = self.index[self.plan.bounds[part]], self.index[self.plan.bounds[part + 1]]
            owners += [part] * (last - first)
        return owners

    def _at_start(self, rank: int) -> list[int]:
        p, root, operation = self.plan.num_ranks, self.plan.root, self.plan.operation
        mine = self.sums.of(rank)
        if operation in ("reduce", "reduce_scatter", "all_reduce"):
            return [mine] * len(self.owners)
        if operation in ("broadcast", "scatter"):
            return [mine if rank == root else 0] * len(self.owners)
        shift = p if operation == "all_to_all" else 1
        return [mine if owner // shift == rank else 0 for owner in self.owners]

    def _move(self, event: Met) -> None:
        where = f"rank {event.destination}, step {event.destination_step}"
        held = self.cells[event.destination]
        for start, stop in event.send.pieces:
            for cell in range(self.index[start], self.index[stop]):
                arriving = self.cells[event.source][cell]
                if not arriving:
                    raise PlanError(f"rank {event.source}, step {event.source_step} sends {self._name(cell)}, "
                                    "which it does not have")
                if event.receive.combine:
                    self.waiting[event.destination].setdefault(cell, []).append((event.source, arriving))
                elif self.sums.is_finished(held[cell]):
                    raise PlanError(f"{where} replaces {self._name(cell)}, which is finished")
                else:
                    held[cell] = arriving

    def _combine(self, rank: int, step: int) -> None:
        where = f"rank {rank}, step {step}"
        for cell, arrived in self.waiting[rank].items():
            present = self.cells[rank][cell]
            if not present:
                raise PlanError(f"{where} adds to {self._name(cell)}, which it does not have")
            ordered = [value for _, value in sorted([*arrived, (rank, present)])]
            if any(self.sums.is_finished(value) for value in ordered):
                raise PlanError(f"{where} adds to {self._name(cell)}, which is finished")
            if self.plan.direct and any(len(self.sums.ranks(value)) > 1 for _, value in arrived):
                raise PlanError(f"{where} adds a partial sum to {self._name(cell)} in a plan that is direct")
            total = ordered[0]
            for value in ordered[1:]:
                if self.sums.overlap(total, value):
                    raise PlanError(f"{where} adds a contribution twice to {self._name(cell)}")
                total = self.sums.add(total, value)
            self.cells[rank][cell] = total
        self.waiting[rank] = {}

    def _finish(self, event: Entered) -> None:
        for finish in event.finishes:
            for cell in range(self.index[finish.start], self.index[finish.stop]):
                value = self.cells[event.rank][cell]
                if not self.sums.is_complete(value) or self.sums.is_finished(value):
                    raise PlanError(f"rank {event.rank}, step {event.step} finishes {self._name(cell)}, which "
                                    f"{self.sums.describe(value)}")
                self.cells[event.rank][cell] = self.sums.finish(value)

    def _check_end(self, rank: int) -> None:
        for cell, owner in enumerate(self.owners):
            held = self.cells[rank][cell]
            if self.plan.direct and len(self.sums.ranks(held)) > 1 and not self.sums.is_finished(held):
                raise PlanError(f"rank {rank} combines but never finishes {self._name(cell)} in a plan that is direct")
            right = self._complaint(rank, cell, owner, held)
            if right:
                raise PlanError(f"at the end {self._name(cell)} on rank {rank} {self.sums.describe(held)}; {right}")

    def _complaint(self, rank: int, cell: int, owner: int, held: int) -> str:
        """What must hold instead, or nothing."""
        p, root, operation = self.plan.num_ranks, self.plan.root, self.plan.operation
        if operation in ("reduce", "reduce_scatter", "all_reduce"):
            if (operation == "reduce" and rank != root) or (operation == "reduce_scatter" and rank != owner):
                return ""
            if not self.sums.is_complete(held) or not self.sums.is_finished(held):
                return f"right are the contributions of ranks {list(range(p))}, finished"
            if operation == "all_reduce" and held != self.cells[0][cell]:
                return "it was added up in another order than on rank 0, so their bits may differ"
            return ""
        source, wanted = {
            "broadcast": (root, True),
            "scatter": (root, rank == owner),
            "gather": (owner, rank == root),
            "all_gather": (owner, True),
            "all_to_all": (owner // p, rank == owner % p),
        }[operation]
        return f"right is the element of rank {source}" if wanted and held != self.sums.of(source) else ""

    def _name(self, cell: int) -> str:
        return f"elements [{self.borders[cell]}, {self.borders[cell + 1]})"


def _borders(plan: CollectivePlan, programs: list[Program]) -> list[int]:
    borders = set(plan.bounds)
    for program in programs:
        for step in program:
            for action in step:
                for interval in action.pieces:
                    borders.update(interval)
    return sorted(borders)


def _check_step(where: str, step: Step, count: int) -> None:
    for action in step:
        for start, stop in action.pieces:
            if not 0 <= start < stop <= count:
                raise PlanError(f"{where}: {action} must name elements of [0, {count}), and at least one")
        if any(max(a[0], b[0]) < min(a[1], b[1]) for a, b in combinations(action.pieces, 2)):
            raise PlanError(f"{where}: {action} names an element twice")
        if isinstance(action, Receive) and action.combine and action.rest:
            raise PlanError(f"{where}: {action} combines, so it must have one interval")
    for a, b in combinations(step, 2):
        overlap = any(max(x[0], y[0]) < min(x[1], y[1]) for x in a.pieces for y in b.pieces)
        if isinstance(a, Finish) or isinstance(b, Finish):
            if overlap:
                raise PlanError(f"{where}: {a} and {b} touch the same elements")
            continue
        if type(a) is type(b) and a.peer == b.peer:
            raise PlanError(f"{where}: {a} and {b} could be taken for one another; use two steps")
        if overlap and not _get_along(a, b):
            raise PlanError(f"{where}: {a} and {b} touch the same elements")


def _get_along(a: Send | Receive, b: Send | Receive) -> bool:
    """Whether two messages of a step may touch the same elements."""
    if isinstance(a, Send) and isinstance(b, Send):
        return True
    if isinstance(a, Receive) and isinstance(b, Receive):
        return a.combine and b.combine and a.pieces == b.pieces
    return all(action.combine for action in (a, b) if isinstance(action, Receive))
