"""The order of one micro-batch alone: forward through all stages and back.

    ranks of the stages (0, 1, 0)       rank 0: 0F2 2F2 2B2 0B2     rank 1: 1F2 1B2     and what they send

Pure, standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.schedule import Action, Backward, Compute, Forward

__all__ = ["alone"]


def alone(plan: PipelinePlan, micro_batch: int) -> tuple[tuple[Action, ...], ...]:
    """For each rank of `plan` what it does for that micro-batch, with messages; no reduction, no update."""
    stages = [stage for stage in range(len(plan.places)) if micro_batch in plan.micro_batches_of(stage)]
    there: list[Compute] = [Forward(micro_batch, stage) for stage in stages]
    back: list[Compute] = [Backward(micro_batch, stage=stage) for stage in reversed(stages)]
    orders = tuple(tuple(action for action in there + back if plan.places[action.stage] == rank)
                   for rank in range(plan.num_ranks))
    return with_messages(replace(plan, orders=orders))
