"""The picture of a pipeline as text: ranks are rows, time runs to the right.

    1f1b, 2 ranks, 3 micro-batches: makespan 12, bubble 3 (33.3 % of the ideal time, 25.0 % of the makespan)
    rank 0  F0 F1 .  B0 -- F2 .  B1 -- .  B2 --  stash 2, idle 3
    rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .   stash 1, idle 0

`--` goes on with what is left of it, `.` waits; 2F0 names stage 2 where a rank has several. Owns the text only; `grid`
takes the spans of a planned or a real run alike. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from hpctrain.plan.pipeline.simulate import Timeline
from hpctrain.plan.pipeline.stash import peaks
from hpctrain.plan.pipeline.trace import Span, Time
from hpctrain.plan.schedule import symbol

__all__ = ["draw", "grid"]

#: Columns above which the default column is no longer exact but this part of the makespan.
MOST_COLUMNS = 240


def draw(timeline: Timeline, unit: Time | None = None) -> str:
    """The picture, with a title and the numbers of each rank; `unit` is the time of a column (see `grid`)."""
    plan = timeline.plan
    title = (f"{plan.name}, {plan.num_ranks} rank{'s' * (plan.num_ranks != 1)}, {plan.num_micro_batches} "
             f"micro-batch{'es' * (plan.num_micro_batches != 1)}: makespan {shown(timeline.makespan)}, bubble "
             f"{shown(timeline.bubble)} ({timeline.bubble_of_ideal:.1%} of the ideal time, "
             f"{timeline.bubble_of_makespan:.1%} of the makespan)").replace("%", " %")
    several = any(len(plan.stages_of(rank)) > 1 for rank in range(plan.num_ranks))
    lines, most = [title], peaks(plan)
    for rank, row in enumerate(grid(timeline.spans, unit, stages=several)):
        peak = most[rank]
        numbers = f"stash {peak.stash}" + f", held {peak.held}" * (peak.held != peak.stash)
        name = f"rank {rank:<{len(str(plan.num_ranks - 1))}}"
        lines.append(f"{name}  {row}  {numbers}, idle {shown(timeline.idle(rank))}")
    return "\n".join(lines)


def grid(spans: Sequence[Sequence[Span]], unit: Time | None = None, *, stages: bool = False) -> list[str]:
    """One line a rank. `unit` is the time of a column.

    When not given it is the largest that shows all times exactly, but never so small that there are more than 240
    columns: then, as with a unit that does not fit, times are rounded to columns, and every action keeps one.
    """
    unit = _unit(spans) if unit is None else unit
    names = [[symbol(span.action, stages=stages).rstrip("*") for span in row] for row in spans]
    width = max((len(name) for row in names for name in row), default=1)
    lines = []
    for row, shown_names in zip(spans, names):
        cells: list[str] = []
        for span, name in zip(row, shown_names):
            cells += ["."] * (round(span.start / unit) - len(cells))
            if span.stop > span.start:
                cells += [name] + ["-" * width] * (round(span.stop / unit) - len(cells) - 1)
        lines.append(cells)
    columns = max(map(len, lines), default=0)
    return [" ".join(cell.ljust(width) for cell in cells + ["."] * (columns - len(cells))) for cells in lines]


def shown(time: Time) -> str:
    """A time as a short decimal number."""
    return f"{float(time):.6g}"


def _unit(spans: Sequence[Sequence[Span]]) -> Time:
    """The greatest common divisor of all times, or 1 / 240 of the last one."""
    ends = {Fraction(t).limit_denominator(10**6) for row in spans for span in row for t in (span.start, span.stop)}
    last = max(ends, default=Fraction(0))
    if not last:
        return 1
    common = lcm(*(end.denominator for end in ends))
    unit = Fraction(gcd(*(int(end * common) for end in ends)), common)
    return max(unit, last / MOST_COLUMNS)
