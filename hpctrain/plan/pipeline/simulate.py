"""When everything happens, given how long each action takes: makespan, bubble, idle time.

    Times.even(plan)                            1 for a forward, for the gradients of input and of weights, all alike
    Times((3, 4), (3, 4), (2, 3), message=1)    given stage by stage
    Times.measured(trainer.trace(), 4)          those of a run

An action begins when its rank is free and what it needs is there: `message` after the neighbour finished it, at once on
the same rank. Messages cost the ranks no time, and do not wait for each other; reductions and updates take none. Owns
this arithmetic; exact for integers and fractions. Pure, standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import fsum

from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.trace import Span, Time
from hpctrain.plan.schedule import Action, Backward, BackwardInput, BackwardWeight, Compute, Forward, symbol

__all__ = ["Timeline", "Times", "simulate"]


@dataclass(frozen=True)
class Times:
    """How long each stage takes for one micro-batch, in any unit.

    Attributes:
        forward: for each stage.
        backward_input: the gradient of its input.
        backward_weight: the gradient of its weights; 0 where they are frozen.
        message: from the end of an action to the moment another rank has its result.
        paired: DualPipe's overlap: a forward right before a whole backward runs together with it, in this part of
            their two times (1: no gain); both begin when both inputs are there, and both results are there at the end.
            None: one after the other.
        backward: a whole backward, which may be cheaper than its two parts; None: input plus weight.
    """

    forward: Sequence[Time]
    backward_input: Sequence[Time]
    backward_weight: Sequence[Time]
    message: Time = 0
    paired: Time | None = None
    backward: Sequence[Time] | None = None

    def __post_init__(self) -> None:
        whole = () if self.backward is None else (self.backward,)
        rows = (self.forward, self.backward_input, self.backward_weight, *whole)
        if len({len(row) for row in rows}) != 1 or min(*chain(*rows), self.message, self.paired or 0) < 0:
            raise ConfigError("times: forward, backward_input, backward_weight and backward must have one time of at "
                              "least 0 for each stage, and message and paired must be at least 0")

    @classmethod
    def even(
        cls, plan: PipelinePlan, forward: Time = 1, backward_input: Time = 1, backward_weight: Time = 1
    ) -> Times:
        """All stages alike. The times are those of depth / ranks stages: chunks share the time of an uncut rank."""
        share = Fraction(plan.num_ranks, plan.depth)
        forward, backward_input, backward_weight = (
            t * share if isinstance(t, int | Fraction) else t * float(share)
            for t in (forward, backward_input, backward_weight)
        )
        count = len(plan.places)
        return cls((forward,) * count, (backward_input,) * count, (backward_weight,) * count)

    @classmethod
    def measured(cls, spans: Iterable[Span], num_stages: int) -> Times:
        """The mean times of a run, each kind of action by itself. What did not run is taken from what did, else 0."""
        found: dict[tuple[type, int], list[float]] = defaultdict(list)
        for span in spans:
            found[type(span.action), getattr(span.action, "stage", 0)].append(float(span.stop - span.start))
        mean = {key: fsum(times) / len(times) for key, times in found.items()}
        forward, whole, first, second = ([mean.get((kind, stage)) for stage in range(num_stages)]
                                         for kind in (Forward, Backward, BackwardInput, BackwardWeight))
        backward = [b if b is not None else (i or 0) + (w or 0) for b, i, w in zip(whole, first, second, strict=True)]
        return cls([f or 0 for f in forward], [b if i is None else i for i, b in zip(first, backward, strict=True)],
                   [w or 0 for w in second], backward=backward)

    def of(self, action: Action) -> Time:
        """How long `action` takes; 0 for what does not compute."""
        match action:
            case Forward():
                return self.forward[action.stage]
            case Backward():
                return (self.backward_input[action.stage] + self.backward_weight[action.stage]
                        if self.backward is None else self.backward[action.stage])
            case BackwardInput():
                return self.backward_input[action.stage]
            case BackwardWeight():
                return self.backward_weight[action.stage]
        return 0


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks' computation, each rank's in order."""

    plan: PipelinePlan
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        """From the first action of all ranks to the last one's end: the step, where all ranks update together."""
        return max((spans[-1].stop for spans in self.spans if spans), default=0)

    def busy(self, rank: int) -> Time:
        """The time in which `rank` computes."""
        return sum((span.stop - span.start for span in self.spans[rank]), start=0)

    def idle(self, rank: int) -> Time:
        """The time in which `rank` waits between its own first and last action."""
        spans = self.spans[rank]
        return spans[-1].stop - spans[0].start - self.busy(rank) if spans else 0

    @property
    def ideal(self) -> Time:
        """The work of the busiest rank: the makespan without any waiting."""
        return max((self.busy(rank) for rank in range(len(self.spans))), default=0)

    @property
    def bubble(self) -> Time:
        """Makespan less ideal, a time."""
        return self.makespan - self.ideal

    @property
    def bubble_of_ideal(self) -> float:
        """Bubble / ideal, as in the Megatron papers: (ranks - 1) / micro-batches for 1F1B."""
        return float(self.bubble / self.ideal) if self.ideal else 0.0

    @property
    def bubble_of_makespan(self) -> float:
        """Bubble / makespan, as in GPipe's: (ranks - 1) / (micro-batches + ranks - 1) for 1F1B."""
        return float(self.bubble / self.makespan) if self.makespan else 0.0


def simulate(plan: PipelinePlan, times: Times | None = None) -> Timeline:
    """Every action as early as its rank's order and its inputs allow. `times` is `Times.even(plan)` when not given.

    Raises:
        ConfigError: not one time for each stage.
        PlanError: ranks wait for each other for ever.
    """
    times = Times.even(plan) if times is None else times
    if len(times.forward) != len(plan.places):
        raise ConfigError(f"times for {len(times.forward)} stages, but {plan.name} has {len(plan.places)}")
    orders = [[a for a in order if isinstance(a, Forward | Backward | BackwardInput | BackwardWeight)]
              for order in plan.orders]
    done: dict[tuple[bool, int, int], Time] = {}  # (forward?, stage, micro-batch) -> end
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while block := _block(order, len(spans[rank]), times):
                ready = _ready(plan, block, done, times)
                if ready is None:
                    break
                start = max(ready, spans[rank][-1].stop) if spans[rank] else ready
                spans[rank] += _spans(rank, block, start, times)
                for action in block:
                    if not isinstance(action, BackwardWeight):
                        done[isinstance(action, Forward), action.stage, action.micro_batch] = spans[rank][-1].stop
                moved = True
    for rank, order in enumerate(orders):
        if len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            raise PlanError(f"{plan.name}: rank {rank}, stage {action.stage}: {symbol(action, stages=True)} can never "
                            f"run; hpctrain.plan.pipeline.proof says why")
    return Timeline(plan, tuple(map(tuple, spans)))


def _block(order: Sequence[Compute], slot: int, times: Times) -> Sequence[Compute]:
    """What begins together at `slot`: one action, or a forward and the backward it is paired with; empty at the end."""
    two = order[slot : slot + 2]
    if times.paired is not None and len(two) == 2 and isinstance(two[0], Forward) and isinstance(two[1], Backward):
        needs_it = (two[0].stage, two[0].micro_batch) == (two[1].stage, two[1].micro_batch)
        return two[:1] if needs_it else two
    return two[:1]


def _spans(rank: int, block: Sequence[Compute], start: Time, times: Times) -> Iterator[Span]:
    """The spans of a block, one after the other."""
    part = times.paired if len(block) > 1 and times.paired is not None else 1
    for action in block:
        stop = start + times.of(action) * part
        yield Span(rank, action, start, stop)
        start = stop


def _ready(
    plan: PipelinePlan, block: Sequence[Compute], done: dict[tuple[bool, int, int], Time], times: Times
) -> Time | None:
    """When all inputs of `block` are on its rank; None while they are not known."""
    ready: Time = 0
    for action in block:
        for forward, stage in _needs(plan, action):
            end = done.get((forward, stage, action.micro_batch))
            if end is None:
                return None
            remote = plan.places[stage] != plan.places[action.stage]
            ready = max(ready, end + times.message if remote else end)
    return ready


def _needs(plan: PipelinePlan, action: Compute) -> Iterator[tuple[bool, int]]:
    """(forward?, stage) of what has to be done for the same micro-batch before."""
    if isinstance(action, BackwardWeight):
        yield False, action.stage
        return
    if not isinstance(action, Forward):
        yield True, action.stage
    neighbour = plan.before(action.stage) if isinstance(action, Forward) else plan.after(action.stage)
    if neighbour is not None:
        yield isinstance(action, Forward), neighbour
