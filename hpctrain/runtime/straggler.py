"""Who is slower than the others, step after step.

Owns the timing of each step's parts on this rank, the comparison of all ranks every few steps, and the line about it.
Time in which a rank is blocked in communication is left out: waiting for a slow rank makes nobody slow.

    end of step   data      forward     backward       (wait)   update   end of step
         |---------|------------|--------------|..................|--------|
            busy        busy           busy          not counted     busy

A rank stands for itself by the median of its last steps, so that one pause (a validation, a checkpoint) counts for
nothing; the others stand by the median over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from hpctrain.collectives import Group
from hpctrain.collectives.recorder import Recorder

__all__ = ["FACTOR", "PARTS", "StepTimes", "find_slow"]

PARTS = ("data", "forward", "backward", "update")
FACTOR = 1.5  # of the others' time, from which on a rank is called slow
LEAST = 0.002  # seconds a step by which it must be slower


class StepTimes:
    """The times of one rank's steps.

    `step_ends` is collective over the group every `every` steps (0: never), and otherwise local like the rest.
    `say` gets a line on rank 0 when a rank is found slow that was not the slow one before.
    """

    def __init__(self, group: Group, recorder: Recorder, host: str, every: int, say: Callable[[str], None]) -> None:
        self._group, self._recorder, self._host, self._every, self._say = group, recorder, host, every, say
        self._window: list[list[float]] = []
        self._now = [0.0] * len(PARTS)
        self._mark = self._busy_clock()
        self._named: tuple[int, str] | None = None

    def part(self, name: str) -> None:
        """What was done since the last call of this kind belongs to the step's part `name`."""
        if not self._every:
            return
        mark = self._busy_clock()
        self._now[PARTS.index(name)] += mark - self._mark
        self._mark = mark

    def step_ends(self) -> None:
        """The step is over; now and then all ranks compare."""
        if not self._every:
            return
        self.part("update")
        self._window.append(self._now)
        self._now = [0.0] * len(PARTS)
        if len(self._window) < self._every:
            return
        mine = [round(median(part), 6) for part in zip(*self._window)]
        self._window = []
        told = self._group.exchange([self._host, mine])
        slow = find_slow([times for _, times in told])
        if slow is not None and slow[:2] != self._named and self._group.rank == 0:
            rank, part, factor = slow
            own, others = sum(told[rank][1]), sum(told[rank][1]) / factor
            self._say(f"rank {rank} on {told[rank][0]} is slower than the others: {1e3 * own:.1f} ms a step before it "
                      f"waits for anybody, {factor:.1f} times their {1e3 * others:.1f} ms; most of it in {part}")
        self._named = None if slow is None else slow[:2]
        self._mark = self._busy_clock()

    def _busy_clock(self) -> float:
        """Seconds of this rank in which it was not blocked."""
        return time.monotonic() - self._recorder.blocked_seconds


def find_slow(times: Sequence[Sequence[float]]) -> tuple[int, str, float] | None:
    """(rank, part in which it is slower, factor) of the slowest rank, if it is slower by FACTOR and LEAST. Pure.

    `times[rank]` are seconds a step by PARTS.
    """
    totals = [sum(parts) for parts in times]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    others = [rank for rank in range(len(totals)) if rank != slowest]
    if not others:
        return None
    usual = median(totals[rank] for rank in others)
    if totals[slowest] < FACTOR * usual or totals[slowest] - usual < LEAST:
        return None
    excess = [times[slowest][i] - median(times[rank][i] for rank in others) for i in range(len(PARTS))]
    return slowest, PARTS[excess.index(max(excess))], totals[slowest] / usual if usual else float("inf")
