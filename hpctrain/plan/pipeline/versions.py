"""Which version of its weights every stage uses for every micro-batch, where a pipeline updates without a flush.

    pipedream, 3 stages      micro-batch  0  1  2  3  4        version v: v updates have been made
                             stage 0      0  0  0  1  2
                             stage 1      0  0  1  2  3        w(t+1) = w(t) - lr grad f(w0(t-2), w1(t-1), w2(t))
                             stage 2      0  1  2  3  4

    one        a single version; a backward never meets an update after its forward
    stash      the newest at the forward; kept until the backward
    vertical   at all stages the version that the first stage used for the micro-batch
    double     the version before that which the gradient's update builds on (PipeDream-2BW)

A backward always uses its forward's version. Owns these rules as data: the executor looks them up. Pure, standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.schedule import Backward, BackwardWeight, Forward, OptimizerStep, symbol

__all__ = ["Versions", "versions"]


@dataclass(frozen=True)
class Versions:
    """The versions of all stages.

    Attributes:
        used: `used[stage][micro_batch]` is the version for its forward and backward.
        made: `made[stage][micro_batch]` is the version that the update with its gradient makes.
        kept: for each stage, most versions needed at one time, the newest included.
    """

    used: tuple[dict[int, int], ...]
    made: tuple[dict[int, int], ...]
    kept: tuple[int, ...]


def versions(plan: PipelinePlan) -> Versions:
    """The versions of `plan`.

    Raises:
        PlanError: a micro-batch needs a version that its stage does not have then; names rank, stage, slot, action.
    """
    newest: list[dict[int, int]] = []  # for each stage the updates before each forward
    made: list[dict[int, int]] = []
    for stage in range(len(plan.places)):
        before, after = _count(plan, stage)
        newest.append(before)
        made.append(after)
    used = tuple(
        {i: _version(plan, stage, i, newest, made) for i in newest[stage]} for stage in range(len(plan.places))
    )
    kept = tuple(_kept(plan, stage, used[stage], newest[stage]) for stage in range(len(plan.places)))
    return Versions(used, tuple(made), kept)


def _count(plan: PipelinePlan, stage: int) -> tuple[dict[int, int], dict[int, int]]:
    """For each micro-batch the updates before its forward, and the version that its gradient becomes part of."""
    updates = 0
    before, made = {}, {}
    for action in plan.orders[plan.places[stage]]:
        if isinstance(action, OptimizerStep):
            updates += 1
        elif isinstance(action, Forward) and action.stage == stage:
            before[action.micro_batch] = updates
        elif isinstance(action, Backward | BackwardWeight) and action.stage == stage:
            made[action.micro_batch] = updates + 1
    return before, made


def _version(plan: PipelinePlan, stage: int, i: int, newest: list[dict[int, int]], made: list[dict[int, int]]) -> int:
    """The version that `stage` uses for micro-batch `i`; it has to be there at the forward."""
    here = newest[stage][i]
    match plan.weights:
        case "one":
            wanted = made[stage].get(i, here + 1) - 1
        case "vertical":
            wanted = newest[stage - stage % plan.depth].get(i, here)
        case "double":
            wanted = max(0, made[stage].get(i, 1) - 2)
        case _:
            wanted = here
    if wanted > here:
        slot = plan.orders[plan.places[stage]].index(Forward(i, stage))
        rule = ("an update comes between its forward and its backward" if plan.weights == "one"
                else f"it needs version {wanted} of the weights, and only version {here} is there")
        raise PlanError(f"{plan.name}: rank {plan.places[stage]}, stage {stage}, slot {slot}, "
                        f"{symbol(Forward(i, stage), stages=True)}: weights = {plan.weights!r}, but {rule}")
    return wanted


def _kept(plan: PipelinePlan, stage: int, used: dict[int, int], newest: dict[int, int]) -> int:
    """Most versions at one time: those that a micro-batch under way or to come uses, and the newest."""
    waiting = dict(used)  # micro-batches whose backward is still to come
    updates, most = 0, 1
    for action in plan.orders[plan.places[stage]]:
        if isinstance(action, OptimizerStep):
            updates += 1
        elif isinstance(action, Backward | BackwardWeight) and action.stage == stage:
            waiting.pop(action.micro_batch, None)
        most = max(most, len({updates, *(v for v in waiting.values() if v <= updates)}))
    return most
