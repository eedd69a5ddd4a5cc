"""How much a rank holds on to while a schedule runs: counted from the orders, no times needed.

    1f1b, rank 0 of 3     F0 F1 F2 B0 F3 B1 ...
    stash                 1  2  3  2  3  2           forward done, gradient of the input not yet
    held                  the same, but until the gradient of the weights is done

One forward of one stage counts 1; give bytes for bytes. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward

__all__ = ["Peak", "peak_bytes", "peaks", "stage_peaks"]


@dataclass(frozen=True)
class Peak:
    """Most at one time: `stash`, forwards without gradient of the input; `held`, without gradient of the weights."""

    stash: int
    held: int


def peaks(plan: PipelinePlan) -> tuple[Peak, ...]:
    """The peak of each rank, over all its stages together."""
    return tuple(_peak(plan, rank, plan.stages_of(rank)) for rank in range(plan.num_ranks))


def stage_peaks(plan: PipelinePlan) -> tuple[Peak, ...]:
    """The peak of each stage alone."""
    return tuple(_peak(plan, rank, (stage,)) for stage, rank in enumerate(plan.places))


def peak_bytes(plan: PipelinePlan, activation: Sequence[int], weight_part: Sequence[int]) -> tuple[int, ...]:
    """Most bytes at one time on each rank.

    `activation[s]` bytes from a forward of stage s to its backward, or to its input's part; from there to the weights'
    part `weight_part[s]`.
    """
    result = []
    for order in plan.orders:
        now = most = 0
        for action in order:
            match action:
                case Forward():
                    now += activation[action.stage]
                case Backward():
                    now -= activation[action.stage]
                case BackwardInput():
                    now += weight_part[action.stage] - activation[action.stage]
                case BackwardWeight():
                    now -= weight_part[action.stage]
            most = max(most, now)
        result.append(most)
    return tuple(result)


def _peak(plan: PipelinePlan, rank: int, stages: Sequence[int]) -> Peak:
    stash = held = most_stash = most_held = 0
    for action in plan.orders[rank]:
        if isinstance(action, Forward | Backward | BackwardInput | BackwardWeight) and action.stage in stages:
            stash += isinstance(action, Forward) - isinstance(action, Backward | BackwardInput)
            held += isinstance(action, Forward) - isinstance(action, Backward | BackwardWeight)
            most_stash, most_held = max(most_stash, stash), max(most_held, held)
    return Peak(most_stash, most_held)
