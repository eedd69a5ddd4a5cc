"""What a pipeline is to do: an order of actions for every rank, and which rank holds which stage.

    places (0, 1, 0, 1)      stage 0 -> 1 -> 2 -> 3           a micro-batch passes the stages in order, and back
                      rank   0    1    0    1           rank 0 holds stages 0 and 2: its chunks 0 and 1

    copies 2, places (0, 1, 1, 0): stages 0 -> 1 are one copy of the model, 2 -> 3 another; half of the micro-batches
    goes through each (DualPipe)

Sends and receives are no part of it: `messages` derives them. Owns the record and how an order is completed by its
reduction and update. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import ConfigError, PlanError, choices
from hpctrain.plan.schedule import Action, Backward, BackwardWeight, Compute, OptimizerStep, ReduceGrads

__all__ = ["WEIGHTS", "PipelinePlan", "complete", "make_plan", "plan_of", "require"]

#: Which version of its weights a stage uses for a micro-batch (see `versions`).
WEIGHTS = ("one", "stash", "vertical", "double")


@dataclass(frozen=True)
class PipelinePlan:
    """The orders of all ranks. Plain data; `proof.prove` says whether it can be run.

    Attributes:
        name: of the schedule.
        num_micro_batches: of the step; numbered from 0.
        places: the rank of each stage.
        orders: for each rank its actions, without sends and receives.
        copies: copies of the model; each is as many stages as the others.
        weights: one of WEIGHTS.
    """

    name: str
    num_micro_batches: int
    places: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    copies: int = 1
    weights: str = "one"

    @property
    def num_ranks(self) -> int:
        """Ranks along the pipeline axis."""
        return len(self.orders)

    @property
    def depth(self) -> int:
        """Stages that one micro-batch passes."""
        return len(self.places) // self.copies

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, its chunks, in order; may be none."""
        return tuple(stage for stage, place in enumerate(self.places) if place == rank)

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The stages of the model that `rank` holds, numbered as in the first copy: what its parameters are of."""
        return tuple(sorted({stage % self.depth for stage in self.stages_of(rank)}))

    def peers(self) -> tuple[tuple[int, ...], ...]:
        """For each rank those that hold the same stages of the model, itself among them; with one copy nobody else."""
        parts: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.places):
            parts[rank].add(stage % self.depth)
        alike: dict[frozenset[int], list[int]] = {}
        for rank, mine in enumerate(parts):
            alike.setdefault(frozenset(mine), []).append(rank)
        return tuple(tuple(alike[frozenset(mine)]) if mine else (rank,) for rank, mine in enumerate(parts))

    def before(self, stage: int) -> int | None:
        """The stage that feeds `stage`; None for the first of its copy."""
        return stage - 1 if stage % self.depth else None

    def after(self, stage: int) -> int | None:
        """The stage that `stage` feeds; None for the last of its copy."""
        return stage + 1 if (stage + 1) % self.depth else None

    def micro_batches_of(self, stage: int) -> range:
        """The micro-batches that pass `stage`: all, or with two copies the first or the second half."""
        copy = stage // self.depth
        first, stop = (-(-number * self.num_micro_batches // self.copies) for number in (copy, copy + 1))
        return range(first, stop)


def require(name: str, value: int, low: int = 1) -> None:
    """Raises ConfigError unless the size `name` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} = {value!r} must be an integer of at least {low}")


def complete(order: Iterable[Action]) -> tuple[Action, ...]:
    """An order with its end (reduce, update) where it has no update, and stars on the last gradients of each stage."""
    actions = list(order)
    if not any(isinstance(action, OptimizerStep) for action in actions):
        actions += [ReduceGrads(), OptimizerStep()]
    complete_stages: set[int] = set()
    for slot in reversed(range(len(actions))):
        action = actions[slot]
        if isinstance(action, OptimizerStep):
            complete_stages.clear()
        elif isinstance(action, Backward | BackwardWeight):
            actions[slot] = replace(action, completes=action.stage not in complete_stages)
            complete_stages.add(action.stage)
    return tuple(actions)


def make_plan(
    name: str,
    num_micro_batches: int,
    places: Sequence[int],
    orders: Iterable[Iterable[Action]],
    *,
    copies: int = 1,
    weights: str = "one",
) -> PipelinePlan:
    """A plan from orders that hold computation alone (or updates too); `complete` adds the rest.

    Raises:
        ConfigError: sizes below 1, or an unknown `weights`.
        PlanError: a stage on a rank that is not there, or stages that do not divide into the copies.
    """
    require("micro-batches", num_micro_batches)
    require("copies", copies)
    if weights not in WEIGHTS:
        raise ConfigError(f"weights = {weights!r} is unknown; legal are {choices(WEIGHTS)}")
    completed = tuple(complete(order) for order in orders)
    if not places or len(places) % copies:
        raise PlanError(f"{name}: {len(places)} stages do not make {copies} equal cop{'y' if copies == 1 else 'ies'}")
    for stage, rank in enumerate(places):
        if not 0 <= rank < len(completed):
            raise PlanError(f"{name}: stage {stage} is on rank {rank}, but there are {len(completed)} ranks")
    return PipelinePlan(name, num_micro_batches, tuple(places), completed, copies, weights)


def plan_of(
    function: Callable[[int, int, int], Iterable[Compute]], num_ranks: int, num_micro_batches: int, chunks: int = 1
) -> PipelinePlan:
    """The plan of a user's function: `function(rank, num_ranks, num_micro_batches)` gives the order of a rank.

    Chunk c of rank r is stage c * num_ranks + r. Raises ConfigError for sizes below 1.
    """
    for name, value in (("ranks", num_ranks), ("micro-batches", num_micro_batches), ("chunks", chunks)):
        require(name, value)
    orders = [function(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    return make_plan(function.__name__, num_micro_batches, tuple(range(num_ranks)) * chunks, orders)
