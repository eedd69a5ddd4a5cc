"""The sends and receives of a pipeline, derived from what the ranks compute.

    rank 0: F0 F1 B0 B1         ->    F0 SA0 F1 SA1 RG0 B0 RG1 B1
    rank 1: F0 B0 F1 B1         ->    RA0 F0 B0 SG0 RA1 F1 B1 SG1

A result is sent as soon as it is there. It is received just before it is needed, in the order in which it was sent:
what was sent earlier and is needed later is received on the way. Stages on the same rank send nothing. A receiver may
post its receives as early as it likes; only their order counts. Pure, standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.schedule import (
    Action,
    Backward,
    BackwardInput,
    Forward,
    Message,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    symbol,
)

__all__ = ["Channel", "channel", "with_messages"]

#: Messages of one kind from one stage to its neighbour, in order: ("activation" or "grad", sending stage).
Channel = tuple[str, int]


def channel(message: Message) -> Channel:
    """The channel of a message: the same for the send and its receive."""
    match message:
        case SendActivation():
            return "activation", message.stage
        case RecvActivation():
            return "activation", message.stage - 1
        case SendGrad():
            return "grad", message.stage
        case RecvGrad():
            return "grad", message.stage + 1


def with_messages(plan: PipelinePlan) -> tuple[tuple[Action, ...], ...]:
    """For each rank its order, with sends and receives.

    Raises:
        PlanError: an action needs what no stage ever sends; names rank, stage, slot and action.
    """
    waiting: dict[Channel, deque[int]] = {}
    for order in plan.orders:
        for action in order:
            if (send := _send(plan, action)) is not None:
                waiting.setdefault(channel(send), deque()).append(send.micro_batch)
    return tuple(tuple(_rank(plan, rank, waiting)) for rank in range(plan.num_ranks))


def _rank(plan: PipelinePlan, rank: int, waiting: dict[Channel, deque[int]]) -> Iterator[Action]:
    """The order of one rank, with messages; takes what it receives out of `waiting`."""
    received: set[tuple[Channel, int]] = set()
    for slot, action in enumerate(plan.orders[rank]):
        needed = _receive(plan, action)
        while needed is not None and (channel(needed), needed.micro_batch) not in received:
            queue = waiting.get(channel(needed))
            if not queue:
                raise PlanError(f"{plan.name}: rank {rank}, slot {slot}: {symbol(action, stages=True)} needs "
                                f"micro-batch {needed.micro_batch} of stage {channel(needed)[1]}, which never runs it")
            first = queue.popleft()
            received.add((channel(needed), first))
            yield type(needed)(first, needed.stage)
        yield action
        if (send := _send(plan, action)) is not None:
            yield send


def _send(plan: PipelinePlan, action: Action) -> SendActivation | SendGrad | None:
    """What is sent after `action`."""
    if isinstance(action, Forward):
        after = plan.after(action.stage)
        if after is not None and plan.places[after] != plan.places[action.stage]:
            return SendActivation(action.micro_batch, action.stage)
    elif isinstance(action, Backward | BackwardInput):
        before = plan.before(action.stage)
        if before is not None and plan.places[before] != plan.places[action.stage]:
            return SendGrad(action.micro_batch, action.stage)
    return None


def _receive(plan: PipelinePlan, action: Action) -> RecvActivation | RecvGrad | None:
    """What has to be received before `action`."""
    if isinstance(action, Forward):
        before = plan.before(action.stage)
        if before is not None and plan.places[before] != plan.places[action.stage]:
            return RecvActivation(action.micro_batch, action.stage)
    elif isinstance(action, Backward | BackwardInput):
        after = plan.after(action.stage)
        if after is not None and plan.places[after] != plan.places[action.stage]:
            return RecvGrad(action.micro_batch, action.stage)
    return None
