"""Proves that a pipeline can be run: everything once, in order, every send received, nobody waiting for ever.

Owns what "right" means for a schedule. The counting comes first, then the whole pipeline is played with channels that
hold so many messages: a send goes on when its channel has room, a receive when a message is there. Ranks do their
actions in order, so whether the play ends does not depend on who is fast. Pure, standard library only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.messages import channel, with_messages
from hpctrain.plan.pipeline.plan import PipelinePlan, complete
from hpctrain.plan.pipeline.stash import Peak, peaks, stage_peaks
from hpctrain.plan.pipeline.versions import versions
from hpctrain.plan.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
    symbol,
)

__all__ = ["Proof", "buffers_needed", "prove"]


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that was proved.

    Attributes:
        messages: all sends of all ranks.
        buffers: messages that a channel must be able to hold so that nobody waits for ever.
        ranks: for each rank the peak of what it stashes.
        stages: for each stage the same.
    """

    messages: int
    buffers: int
    ranks: tuple[Peak, ...]
    stages: tuple[Peak, ...]


def prove(plan: PipelinePlan, buffers: int | None = None) -> Proof:
    """Proves `plan`; with `buffers`, also that channels of so many messages are enough.

    That every micro-batch finds the version of the weights that it needs is proved by `versions`.

    Raises:
        PlanError: names rank, stage, slot (index in the rank's order) and action.
    """
    for rank in range(plan.num_ranks):
        _prove_order(plan, rank)
    versions(plan)
    orders = with_messages(plan)
    needed = buffers_needed(plan)
    if buffers is not None and buffers < needed:
        raise PlanError(f"{plan.name}: with {buffers} message{'s' * (buffers != 1)} a channel nobody can go on: "
                        f"{_stuck(plan, orders, buffers)}. {needed} would do")
    sends = sum(isinstance(action, SendActivation | SendGrad) for order in orders for action in order)
    return Proof(sends, needed, peaks(plan), stage_peaks(plan))


def buffers_needed(plan: PipelinePlan) -> int:
    """The fewest messages a channel has to hold (at least 1: a receive posted ahead, or a send under way).

    Raises:
        PlanError: ranks wait for each other however much a channel holds.
    """
    orders = with_messages(plan)
    if complaint := _stuck(plan, orders, plan.num_micro_batches):
        raise PlanError(f"{plan.name}: nobody can go on: {complaint}")
    enough = 1
    while _stuck(plan, orders, enough):
        enough += 1
    return enough


def _prove_order(plan: PipelinePlan, rank: int) -> None:
    """Of one rank alone: every (stage, micro-batch) once forward and once back, and what ends the step."""
    done: Counter[tuple[type, int, int]] = Counter()
    order = plan.orders[rank]
    expected = complete(order)
    for slot, action in enumerate(order):
        where = f"{plan.name}: rank {rank}, slot {slot}, {symbol(action, stages=True)}"
        if isinstance(action, ReduceGrads | OptimizerStep):
            if isinstance(action, OptimizerStep) and (slot == 0 or not isinstance(order[slot - 1], ReduceGrads)):
                raise PlanError(f"{where}: an update (U) follows the reduction (R)")
            continue
        if not isinstance(action, Forward | Backward | BackwardInput | BackwardWeight):
            raise PlanError(f"{where}: sends and receives are derived, not written")
        here, i = action.stage, action.micro_batch
        if not 0 <= here < len(plan.places) or plan.places[here] != rank:
            raise PlanError(f"{where}: the rank holds stages {list(plan.stages_of(rank))}, not stage {here}")
        if i not in plan.micro_batches_of(here):
            through = plan.micro_batches_of(here)
            raise PlanError(f"{where}: micro-batches {through.start}..{through.stop - 1} pass stage {here}, not {i}")
        done[type(action), here, i] += 1
        if done[type(action), here, i] > 1 or (
            not isinstance(action, Forward) and not isinstance(action, BackwardWeight)
            and done[Backward, here, i] + done[BackwardInput, here, i] > 1
        ):
            raise PlanError(f"{where}: stage {here} has done this for micro-batch {i} before")
        first = BackwardInput if isinstance(action, BackwardWeight) else Forward
        if not done[first, here, i]:
            raise PlanError(f"{where}: stage {here} has not run {symbol(first(i, here), stages=True)} yet")
        if action != expected[slot]:
            raise PlanError(f"{where}: the star marks the last gradient of a stage before an update, so this must be "
                            f"{symbol(expected[slot], stages=True)}")
    _prove_whole(plan, rank, done)


def _prove_whole(plan: PipelinePlan, rank: int, done: Counter[tuple[type, int, int]]) -> None:
    """Nothing is missing, and the last gradient is followed by an update."""
    for stage in plan.stages_of(rank):
        for i in plan.micro_batches_of(stage):
            missing: Action | None = None
            if not done[Forward, stage, i]:
                missing = Forward(i, stage)
            elif not done[Backward, stage, i] + done[BackwardInput, stage, i]:
                missing = Backward(i, stage=stage)
            elif done[BackwardInput, stage, i] and not done[BackwardWeight, stage, i]:
                missing = BackwardWeight(i, stage=stage)
            if missing is not None:
                raise PlanError(f"{plan.name}: rank {rank}, stage {stage}: {symbol(missing, stages=True)} is missing")
    if not plan.orders[rank] or not isinstance(plan.orders[rank][-1], OptimizerStep):
        raise PlanError(f"{plan.name}: rank {rank}: the order must end with an update (R U)")


def _stuck(plan: PipelinePlan, orders: tuple[tuple[Action, ...], ...], buffers: int) -> str:
    """Plays all ranks; where each one that cannot end waits, or nothing if all end."""
    sent: Counter[tuple[str, int]] = Counter()
    taken: Counter[tuple[str, int]] = Counter()
    done: set[tuple[bool, int, int]] = set()  # (forward?, stage, micro-batch)
    at = [0] * plan.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and _can_go(plan, order[at[rank]], sent, taken, done, buffers):
                action = order[at[rank]]
                if isinstance(action, SendActivation | SendGrad):
                    sent[channel(action)] += 1
                elif isinstance(action, RecvActivation | RecvGrad):
                    taken[channel(action)] += 1
                elif isinstance(action, Forward | Backward | BackwardInput):
                    done.add((isinstance(action, Forward), action.stage, action.micro_batch))
                at[rank], moved = at[rank] + 1, True
    kinds = SendActivation | SendGrad | RecvActivation | RecvGrad
    waits = []
    for rank, order in enumerate(orders):
        if at[rank] < len(order):
            slot = sum(not isinstance(action, kinds) for action in order[: at[rank]])
            waits.append(f"rank {rank}, slot {slot}, waits in {symbol(order[at[rank]], stages=True)}")
    return "; ".join(waits)


def _can_go(
    plan: PipelinePlan,
    action: Action,
    sent: Counter[tuple[str, int]],
    taken: Counter[tuple[str, int]],
    done: set[tuple[bool, int, int]],
    buffers: int,
) -> bool:
    match action:
        case SendActivation() | SendGrad():
            return sent[channel(action)] - taken[channel(action)] < buffers
        case RecvActivation() | RecvGrad():
            return sent[channel(action)] > taken[channel(action)]
        case Forward():
            source = plan.before(action.stage)
            forward = True
        case Backward() | BackwardInput():
            source = plan.after(action.stage)
            forward = False
        case _:
            return True
    local = source is not None and plan.places[source] == plan.places[action.stage]
    return not local or (forward, source, action.micro_batch) in done
