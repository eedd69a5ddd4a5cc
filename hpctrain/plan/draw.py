"""The picture of a collective plan: rounds are rows, ranks are columns, and each field shows what a rank sends.

    ring reduce_scatter, 4 ranks
    round  rank 0   rank 1   rank 2   rank 3
        0  3 +> 1   0 +> 2   1 +> 3   2 +> 0        rank 0 sends part 3 to rank 1, which adds it
        1  2 +> 1   3 +> 2   0 +> 3   1 +> 0
        2  1 +> 1   2 +> 2   3 +> 3   0 +> 0
           = 0      = 1      = 2      = 3           rank 0 finishes part 0

`>` stores, `+>` combines, `=` finishes. Numbers are parts (2-3: parts 2 and 3; 2.0 in an all-to-all: the block from
rank 2 to rank 0), `all` is everything, [5, 8) are elements where a message does not end with a part.

Owns the text only; `play` says what happens when. For a handful of ranks: the picture grows with ranks x messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from hpctrain.plan.play import Entered, Met, play
from hpctrain.plan.steps import CollectivePlan

__all__ = ["draw"]


def draw(plan: CollectivePlan) -> str:
    """The picture of `plan`. Raises PlanError for a plan that cannot be played (see `play`)."""
    sent: dict[tuple[int, int], list[str]] = defaultdict(list)  # (round, rank) -> messages
    finished: dict[tuple[int, int], list[str]] = defaultdict(list)
    entered, left = [0] * plan.num_ranks, [0] * plan.num_ranks  # rounds in which a rank's step begins, and is over
    num_rounds = 0
    for event in play(plan):
        if isinstance(event, Entered):
            entered[event.rank] = left[event.rank]
            for finish in event.finishes:
                finished[left[event.rank] - 1, event.rank].append(_interval(plan, finish.start, finish.stop))
        else:
            begin = max(entered[event.source], entered[event.destination])
            sent[begin, event.source].append(_message(plan, event))
            for rank in (event.source, event.destination):
                left[rank] = max(left[rank], begin + 1)
            num_rounds = max(num_rounds, begin + 1)
    rows = [["round", *(f"rank {rank}" for rank in range(plan.num_ranks))]]
    for number in range(-1, num_rounds):
        columns = range(plan.num_ranks)
        if number >= 0:
            rows.append([str(number), *(", ".join(sent[number, rank]) for rank in columns)])
        if any(finished[number, rank] for rank in columns):
            rows.append(["", *("= " + ", ".join(f) if (f := finished[number, rank]) else "" for rank in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = f"{plan.algorithm} {plan.operation}, {plan.num_ranks} rank{'s' * (plan.num_ranks > 1)}"
    return "\n".join([title, *(_row(cells, widths) for cells in rows)])


def _row(cells: list[str], widths: list[int]) -> str:
    first, *others = [cell.rjust(w) if i == 0 else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths))]
    return "   ".join([first, *others]).rstrip()


def _message(plan: CollectivePlan, event: Met) -> str:
    what = " ".join(_interval(plan, start, stop) for start, stop in event.send.pieces)
    return f"{what} {'+' * event.receive.combine}> {event.destination}"


def _interval(plan: CollectivePlan, start: int, stop: int) -> str:
    bounds = plan.bounds
    if (start, stop) == (0, plan.count) and plan.operation != "all_to_all" and len(bounds) > 2:
        return "all"
    first, last = bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1)
    if bounds[first] != start or bounds[last] != stop:
        return f"[{start}, {stop})"
    if plan.operation == "all_to_all":
        names = [f"{part // plan.num_ranks}.{part % plan.num_ranks}" for part in (first, last - 1)]
    else:
        names = [str(first), str(last - 1)]
    return names[0] if first == last - 1 else "-".join(names)
