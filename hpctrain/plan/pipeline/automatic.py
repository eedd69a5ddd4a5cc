"""A zero-bubble schedule for given times and a limit of memory: tries some ways of deciding, takes the best.

All ranks are played together. A rank that is free takes a gradient of an input or a forward if one is there and the
forward fits into memory; otherwise a weight gradient, which nobody waits for. The ways of deciding differ in what comes
first, in how many forwards begin the step, and in whether a weight gradient may delay what is about to arrive. The
handcrafted schedules compete, too, where they keep the limit.

Source: zero bubble pipeline parallelism, arXiv 2401.10241, section 3.1. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan, require
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.trace import Time
from hpctrain.plan.pipeline.zero_bubble import zb_h1, zb_h2
from hpctrain.plan.schedule import BackwardInput, BackwardWeight, Compute, Forward, OptimizerStep, ReduceGrads

__all__ = ["automatic", "memory_peaks"]


@dataclass(frozen=True)
class _Way:
    """One way of deciding."""

    alternate: bool  # forward and backward in turn where both could run; else backward first
    patient: bool  # no weight gradient that would delay an arrival that is known
    ahead: int  # forwards at the start: this many for each rank that follows, and one


@dataclass
class _Rank:
    """A rank while it is played."""

    order: list[Compute] = field(default_factory=list)
    clock: Time = 0
    since: Time | None = None  # it waits since then, until `clock`
    done: list[int] = field(default_factory=lambda: [0, 0, 0])  # forwards, inputs' and weights' gradients
    arrivals: tuple[list[Time], list[Time]] = field(default_factory=lambda: ([], []))  # of activations, of gradients

    def next_arrival(self, kind: int, count: int) -> Time:
        """When the next forward (0) or gradient of the input (1) could begin; inf if that is not known."""
        at = self.done[kind]
        return self.arrivals[kind][at] if at < min(count, len(self.arrivals[kind])) else inf


def automatic(
    num_ranks: int,
    num_micro_batches: int,
    times: Times | None = None,
    limit: float | None = None,
    weight_part: float = 1.0,
) -> PipelinePlan:
    """The shortest schedule found, one stage a rank, for `times` (equal ones when not given).

    Args:
        num_ranks: ranks, at least 1.
        num_micro_batches: at least 1.
        times: of each stage.
        limit: how much each rank may hold; a forward holds 1 until the gradient of its input is done, and then
            `weight_part` until that of its weights is. The number of ranks, as 1F1B, when not given.
        weight_part: from 0 to 1.

    Raises:
        ConfigError: a size below 1, a limit below 1, a weight part outside 0..1, not one time for each stage.
    """
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    limit = num_ranks if limit is None else limit
    if not limit >= 1:
        raise ConfigError(f"memory limit = {limit!r} must be at least 1 micro-batch")
    if not 0 <= weight_part <= 1:
        raise ConfigError(f"weight part = {weight_part!r} must be in 0..1")
    times = Times((1,) * num_ranks, (1,) * num_ranks, (1,) * num_ranks) if times is None else times
    found = [make_plan("zb-auto", num_micro_batches, range(num_ranks), plan.orders)
             for plan in (zb_h1(num_ranks, num_micro_batches), zb_h2(num_ranks, num_micro_batches))]
    simulate(found[0], times)  # its complaint about the times comes first
    found = [plan for plan in found if max(memory_peaks(plan, weight_part)) <= limit]
    for alternate, patient, ahead in product((True, False), (True, False), (1, 2, num_micro_batches)):
        orders = _play(times, num_micro_batches, (limit, weight_part), _Way(alternate, patient, ahead))
        found.append(make_plan("zb-auto", num_micro_batches, range(num_ranks), orders))
    return min(found, key=lambda plan: (simulate(plan, times).makespan, max(memory_peaks(plan, weight_part))))


def memory_peaks(plan: PipelinePlan, weight_part: float = 1.0) -> tuple[float, ...]:
    """For each rank the most it holds: 1 from a forward to its input's gradient, then `weight_part`."""
    result = []
    for order in plan.orders:
        inputs = weights = 0
        most = 0.0
        for action in order:
            inputs += isinstance(action, Forward) - isinstance(action, BackwardInput)
            weights += isinstance(action, BackwardInput) - isinstance(action, BackwardWeight)
            assert isinstance(action, Forward | BackwardInput | BackwardWeight | ReduceGrads | OptimizerStep)
            most = max(most, inputs + weight_part * weights)
        result.append(most)
    return tuple(result)


def _play(times: Times, count: int, memory: tuple[float, float], way: _Way) -> list[list[Compute]]:
    """The orders that `way` leads to."""
    ranks = [_Rank() for _ in times.forward]
    ranks[0].arrivals[0].extend([0] * count)
    while any(rank.done[2] < count for rank in ranks):
        number = min((n for n, rank in enumerate(ranks) if rank.done[2] < count), key=lambda n: ranks[n].clock)
        rank = ranks[number]
        assert rank.clock < inf, "every rank waits: the oldest micro-batch can always go on"
        room = way.ahead * (len(ranks) - 1 - number) + 1
        kind = _decide(rank, count, memory, way, room, times.backward_weight[number])
        if kind is None:
            arrivals = (rank.next_arrival(kind, count) for kind in (0, 1))
            rank.since = rank.clock
            rank.clock = min((t for t in arrivals if t > rank.clock), default=inf)
            continue
        rank.since = None
        for at, end in _run(times, ranks, number, kind):
            neighbour = ranks[at]
            if neighbour.since is not None:
                neighbour.clock = min(neighbour.clock, max(neighbour.since, end))
    return [rank.order for rank in ranks]


def _decide(
    rank: _Rank, count: int, memory: tuple[float, float], way: _Way, room: float, weight_time: Time
) -> int | None:
    """What `rank` does now: 0, 1, 2 as in `_Rank.done`, or None to wait."""
    limit, weight_part = memory
    forwards, inputs, weights = rank.done
    fits = forwards - inputs + weight_part * (inputs - weights) + 1 <= limit
    forward, backward = (rank.next_arrival(kind, count) for kind in (0, 1))
    may = fits and (inputs > 0 or forwards < room)
    if may and forward <= rank.clock and (
        backward > rank.clock or (way.alternate and isinstance(rank.order[-1], BackwardInput | BackwardWeight))
    ):
        return 0
    if backward <= rank.clock:
        return 1
    if inputs == weights:
        return None
    soon = min(forward if may else inf, backward)
    return None if way.patient and soon < rank.clock + weight_time else 2


def _run(times: Times, ranks: list[_Rank], number: int, kind: int) -> Iterator[tuple[int, Time]]:
    """Adds an action to a rank; gives (rank, when) of what arrives by it, also at the rank itself."""
    rank, i = ranks[number], ranks[number].done[kind]
    rank.done[kind] += 1
    duration = (times.forward, times.backward_input, times.backward_weight)[kind][number]
    rank.clock += duration
    rank.order.append((Forward(i, number), BackwardInput(i, number), BackwardWeight(i, stage=number))[kind])
    if kind == 2:
        return
    target = number + 1 if kind == 0 else number - 1
    if target == len(ranks):  # the last stage goes back at once
        rank.arrivals[1].append(rank.clock)
    elif target >= 0:
        ranks[target].arrivals[kind].append(rank.clock + times.message)
        yield target, rank.clock + times.message
