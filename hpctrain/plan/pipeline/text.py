"""A pipeline schedule as text, and back.

    schedule 1f1b
    stages 0 1                the rank of each stage
    micro-batches 2
    rank 0: F0 F1 B0 B1* R U
    rank 1: F0 B0 F1 B1* R U

Optional lines are `copies 2` and `weights stash`. A rank with several stages names the stage of every action: `2F0`.
`#` begins a comment. Who writes a schedule by hand may leave out the stars and the final `R U`. Owns this form; whether
the schedule can be run is for `proof` to say. Pure, standard library only.
"""

from __future__ import annotations

import re

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan
from hpctrain.plan.schedule import Action, OptimizerStep, ReduceGrads, from_symbol, to_text

__all__ = ["from_text", "plan_to_text"]

_HEADERS = ("schedule", "stages", "micro-batches", "copies", "weights")


def plan_to_text(plan: PipelinePlan) -> str:
    """The text of `plan`; `from_text` makes the same plan of it."""
    lines = [f"schedule {plan.name}", "stages " + " ".join(map(str, plan.places)),
             f"micro-batches {plan.num_micro_batches}"]
    lines += [f"copies {plan.copies}"] * (plan.copies != 1) + [f"weights {plan.weights}"] * (plan.weights != "one")
    for rank, order in enumerate(plan.orders):
        lines.append(f"rank {rank}: " + to_text(order, stages=len(plan.stages_of(rank)) > 1))
    return "\n".join(lines) + "\n"


def from_text(text: str) -> PipelinePlan:
    """The plan that `text` writes down.

    Raises:
        PlanError: a line that is none of these, with its number; a missing or doubled header or rank.
        ConfigError: a size below 1, or an unknown way of keeping weights.
    """
    headers: dict[str, str] = {}
    rows: dict[int, tuple[int, list[str]]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if found := re.fullmatch(r"rank\s+(\d+)\s*:(.*)", line):
            if int(found[1]) in rows:
                raise PlanError(f"line {number}: rank {found[1]} has an order already")
            rows[int(found[1])] = (number, found[2].split())
            continue
        key, _, value = line.partition(" ")
        if key not in _HEADERS or not value or key in headers:
            raise PlanError(f"line {number}: {line!r} is none of the lines that are still missing: 'schedule NAME', "
                            f"'stages RANK RANK ...', 'micro-batches N', 'copies N', 'weights NAME', 'rank N: ACTIONS'")
        headers[key] = value.strip()
    if missing := [key for key in _HEADERS[:3] if key not in headers]:
        raise PlanError(f"the schedule has no line '{missing[0]} ...'")
    if sorted(rows) != list(range(len(rows))):
        raise PlanError(f"ranks must be numbered from 0 without a gap, not {sorted(rows)}")
    places = [_number(word, "stages") for word in headers["stages"].split()]
    orders = [_order(rank, *rows[rank], places) for rank in range(len(rows))]
    return _as_written(headers, places, orders)


def _order(rank: int, number: int, words: list[str], places: list[int]) -> list[Action]:
    """The actions of a rank's line."""
    stages = [stage for stage, place in enumerate(places) if place == rank]
    only = stages[0] if len(stages) == 1 else None
    actions = []
    for slot, word in enumerate(words):
        try:
            action = from_symbol(word, only)
        except PlanError as error:
            raise PlanError(f"line {number}: rank {rank}, slot {slot}: {error}") from None
        actions.append(action)
    return actions


def _as_written(headers: dict[str, str], places: list[int], orders: list[list[Action]]) -> PipelinePlan:
    """The plan; stars are kept where the text has any, so that the proof finds a wrong one."""
    plan = make_plan(headers["schedule"], _number(headers["micro-batches"], "micro-batches"), places, orders,
                     copies=_number(headers.get("copies", "1"), "copies"), weights=headers.get("weights", "one"))
    if not any(getattr(action, "completes", False) for order in orders for action in order):
        return plan
    end = (ReduceGrads(), OptimizerStep())
    kept = tuple(tuple(order) if OptimizerStep() in order else (*order, *end) for order in orders)
    return PipelinePlan(plan.name, plan.num_micro_batches, plan.places, kept, plan.copies, plan.weights)


def _number(word: str, key: str) -> int:
    if not word.isdigit():
        raise PlanError(f"{key}: {word!r} is not a number")
    return int(word)
