"""What the updates of a plan are made of, where there are several, and which weights must outlive each of them.

    pipedream, 3 ranks, rank 0     F0 F1 F2 B0 R U F3 B1 R U F4 B2 R U ...
    after its updates               0 1 2 : 0      1 2 3 : 0, 1         versions of which a backward is still to come

Where no micro-batch needs the weights any more, an update may be made in place; otherwise the new weights need memory
of their own. Owns this count, and what the stages must agree on. Pure, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.versions import Versions
from hpctrain.plan.schedule import Backward, BackwardWeight, OptimizerStep

__all__ = ["Updates", "is_stale", "updates"]


@dataclass(frozen=True)
class Updates:
    """The updates of a plan.

    Attributes:
        groups: for each update the micro-batches whose gradients it is made of.
        needed: `needed[rank][k]` are the older versions of its weights that a rank still uses after its update k.
        kept: for each rank the most versions at one time, of all its stages together, the newest included.
    """

    groups: tuple[tuple[int, ...], ...]
    needed: tuple[tuple[frozenset[int], ...], ...]
    kept: tuple[int, ...]


def is_stale(plan: PipelinePlan) -> bool:
    """Whether a step of the plan is more than one update from one version of the weights."""
    return plan.weights != "one" or max(_count(plan, rank) for rank in range(plan.num_ranks)) > 1


def updates(plan: PipelinePlan, known: Versions) -> Updates:
    """The updates of a proved plan with one copy of the model; `known` are its versions.

    Raises:
        PlanError: stages that make different updates, or an update of no micro-batch; names stage and update.
    """
    made = known.made[0]
    for stage, other in enumerate(known.made):
        for i, update in other.items():
            if made[i] != update:
                raise PlanError(f"{plan.name}: micro-batch {i} is part of update {made[i]} in stage 0, of update "
                                f"{update} in stage {stage}: a gradient has one weight")
    number = max(made.values())
    groups = tuple(tuple(sorted(i for i, update in made.items() if update == k + 1)) for k in range(number))
    for stage, rank in enumerate(plan.places):
        if _count(plan, rank) > number:
            raise PlanError(f"{plan.name}: rank {rank} with stage {stage} has {_count(plan, rank)} updates, but "
                            f"gradients for {number}: an update needs a gradient")
    for k, group in enumerate(groups):
        if not group:
            raise PlanError(f"{plan.name}: update {k + 1} of {number} has no micro-batch: an update needs a gradient")
    needed = tuple(_needed(plan, rank, known) for rank in range(plan.num_ranks))
    return Updates(groups, needed, tuple(1 + max((len(v) for v in of_rank), default=0) for of_rank in needed))


def _count(plan: PipelinePlan, rank: int) -> int:
    return sum(isinstance(action, OptimizerStep) for action in plan.orders[rank])


def _needed(plan: PipelinePlan, rank: int, known: Versions) -> tuple[frozenset[int], ...]:
    """For each update of a rank the older versions that its stages use afterwards."""
    waiting = {(stage, i): version for stage in plan.stages_of(rank) for i, version in known.used[stage].items()}
    found: list[frozenset[int]] = []
    for action in plan.orders[rank]:
        if isinstance(action, OptimizerStep):
            newest = len(found) + 1
            found.append(frozenset(version for version in waiting.values() if version < newest))
        elif isinstance(action, Backward | BackwardWeight):
            del waiting[action.stage, action.micro_batch]
    return tuple(found)
