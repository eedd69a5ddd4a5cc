"""What a collective plan costs: rounds, elements moved, and time by the alpha-beta-gamma model.

Owns the counting, always from the plan itself and never from a formula. `count` and `price` read one rank's program
and so serve 80,000 ranks; `makespan` plays all ranks. Model: a message of n bytes takes alpha + n beta seconds, adding
n received bytes takes n gamma; the messages of a step are under way at the same time, one each way.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.play import Entered, play
from hpctrain.plan.steps import CollectivePlan, Finish, Receive, Send, Step

__all__ = ["Count", "Machine", "count", "makespan", "price"]


@dataclass(frozen=True)
class Machine:
    """A network and the processors on it: seconds a message, seconds a byte sent, seconds a byte added."""

    alpha: float
    beta: float
    gamma: float


@dataclass(frozen=True)
class Count:
    """What one rank does: steps with a message in them, and elements sent, received, and added to its own."""

    rounds: int
    sent: int
    received: int
    combined: int


def count(plan: CollectivePlan, rank: int) -> Count:
    """Counts the program of `rank`. A round in which it has nothing to send or receive does not count."""
    rounds = sent = received = combined = 0
    for step in plan.program(rank):
        out, into, added = _elements(step)
        rounds += any(not isinstance(action, Finish) for action in step)
        sent, received, combined = sent + out, received + into, combined + added
    return Count(rounds, sent, received, combined)


def price(plan: CollectivePlan, rank: int, num_bytes: int, machine: Machine) -> float:
    """Seconds that `rank` spends on its own program of elements of `num_bytes` bytes if it never waits for a peer."""
    return sum(_seconds(step, num_bytes, machine) for step in plan.program(rank))


def makespan(plan: CollectivePlan, num_bytes: int, machine: Machine) -> float:
    """Seconds until the last rank is through, each waiting for its peers. Work grows with ranks x rounds."""
    programs = [plan.program(rank) for rank in range(plan.num_ranks)]
    # Rank r enters its step entered[r][0] at time entered[r][1]; latest is when its messages will all be there.
    entered = [(-1, 0.0)] * plan.num_ranks
    latest = [0.0] * plan.num_ranks
    for event in play(plan):
        if isinstance(event, Entered):
            entered[event.rank] = (event.step, latest[event.rank])
        else:
            begin = max(entered[event.source][1], entered[event.destination][1])
            num_sent = _length(event.send) * num_bytes
            arrival = begin + machine.alpha + num_sent * machine.beta
            added = arrival + num_sent * machine.gamma * event.receive.combine
            latest[event.source] = max(latest[event.source], arrival)
            latest[event.destination] = max(latest[event.destination], added)
    assert all(step + 1 == len(program) for (step, _), program in zip(entered, programs, strict=True))
    return max(latest)


def _elements(step: Step) -> tuple[int, int, int]:
    sent = sum(_length(a) for a in step if isinstance(a, Send))
    received = sum(_length(a) for a in step if isinstance(a, Receive))
    combined = sum(_length(a) for a in step if isinstance(a, Receive) and a.combine)
    return sent, received, combined


def _length(message: Send | Receive) -> int:
    return sum(stop - start for start, stop in message.pieces)


def _seconds(step: Step, num_bytes: int, machine: Machine) -> float:
    sent, received, combined = _elements(step)
    if not sent and not received:
        return 0.0
    return machine.alpha + num_bytes * (max(sent, received) * machine.beta + combined * machine.gamma)
