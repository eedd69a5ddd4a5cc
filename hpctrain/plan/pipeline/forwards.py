"""The order of a pass that goes forward only, for stages placed in any way.

    ranks of the stages (0, 1, 0, 1), 3 micro-batches      rank 0: 0F0 0F1 2F0 2F1 0F2 2F2
                                                           rank 1: 1F0 1F1 3F0 3F1 1F2 3F2

As many micro-batches as there are ranks pass all stages, then the next ones: no rank waits longer than the fill of the
pipeline, and only so many outputs wait for the next stage of the same rank. All ranks follow one order of all forwards
in which each comes after the one that it needs, so none waits for ever. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.pipeline.plan import PipelinePlan, require
from hpctrain.plan.schedule import Action, Forward

__all__ = ["forwards"]


def forwards(places: Sequence[int], num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """For each rank its forwards, with sends and receives; `places` as in PipelinePlan (one copy)."""
    require("micro-batches", num_micro_batches)
    table = [Forward(i, stage) for first in range(0, num_micro_batches, num_ranks) for stage in range(len(places))
             for i in range(first, min(first + num_ranks, num_micro_batches))]
    orders = tuple(tuple(action for action in table if places[action.stage] == rank) for rank in range(num_ranks))
    return with_messages(PipelinePlan("forwards", num_micro_batches, tuple(places), orders))
