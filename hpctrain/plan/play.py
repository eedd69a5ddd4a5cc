"""Plays a collective plan: all ranks at once, matching sends with receives as a rendezvous transport would.

Owns the order of events only; `check` adds what the elements hold and `cost` adds time. A step is entered when the one
before is complete, and is complete when all its messages have met their partners. Ranks need not be in lockstep. What
meets what does not depend on who is fast, since messages of one pair of ranks meet in the order of their posting: one
play stands for all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.errors import PlanError
from hpctrain.plan.steps import CollectivePlan, Finish, Receive, Send

__all__ = ["Entered", "Met", "play"]


@dataclass(frozen=True)
class Entered:
    """Rank `rank` posted all messages of its step `step`; the Finish actions in it are `finishes`."""

    rank: int
    step: int
    finishes: tuple[Finish, ...]


@dataclass(frozen=True)
class Met:
    """A send of rank `source` (in its step `source_step`) met a receive of rank `destination`."""

    source: int
    source_step: int
    destination: int
    destination_step: int
    send: Send
    receive: Receive


def play(plan: CollectivePlan) -> Iterator[Entered | Met]:
    """All events of `plan` in an order in which they could happen.

    Raises PlanError, naming rank, step and elements, for a peer that does not exist, a send that meets a receive of
    other elements, and a deadlock.
    """
    programs = [plan.program(rank) for rank in range(plan.num_ranks)]
    step = [-1] * plan.num_ranks
    open_messages = [0] * plan.num_ranks
    sends: dict[tuple[int, int], deque[tuple[int, Send]]] = defaultdict(deque)
    receives: dict[tuple[int, int], deque[tuple[int, Receive]]] = defaultdict(deque)
    ready = deque(range(plan.num_ranks))
    while ready:
        rank = ready.popleft()
        step[rank] += 1
        if step[rank] == len(programs[rank]):
            continue
        actions = programs[rank][step[rank]]
        touched = []
        for action in actions:
            if isinstance(action, Finish):
                continue
            if action.peer == rank or not 0 <= action.peer < plan.num_ranks:
                raise PlanError(f"rank {rank}, step {step[rank]}: {action} has no legal peer")
            open_messages[rank] += 1
            if isinstance(action, Send):
                sends[rank, action.peer].append((step[rank], action))
                touched.append((rank, action.peer))
            else:
                receives[action.peer, rank].append((step[rank], action))
                touched.append((action.peer, rank))
        yield Entered(rank, step[rank], tuple(a for a in actions if isinstance(a, Finish)))
        if open_messages[rank] == 0:
            ready.append(rank)
        for source, destination in touched:
            if sends[source, destination] and receives[source, destination]:
                source_step, sent = sends[source, destination].popleft()
                destination_step, received = receives[source, destination].popleft()
                event = Met(source, source_step, destination, destination_step, sent, received)
                _check_interval(event)
                yield event
                for end in (source, destination):
                    open_messages[end] -= 1
                    if open_messages[end] == 0:
                        ready.append(end)
    _check_all_through(programs, step, sends, receives)


def _check_interval(event: Met) -> None:
    sent, received = event.send, event.receive
    if sent.pieces != received.pieces:
        raise PlanError(
            f"rank {event.source}, step {event.source_step} sends elements {_named(sent.pieces)} but "
            f"rank {event.destination}, step {event.destination_step} receives {_named(received.pieces)}"
        )


def _named(pieces: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"[{start}, {stop})" for start, stop in pieces)


def _check_all_through(programs: list, step: list[int], sends: dict, receives: dict) -> None:
    stuck = [rank for rank, program in enumerate(programs) if step[rank] < len(program)]
    if not stuck:
        return
    waiting = [action for queues in (sends, receives) for queue in queues.values() for _, action in queue]
    rank = stuck[0]
    action = next(a for a in programs[rank][step[rank]] if any(a is w for w in waiting))
    raise PlanError(f"deadlock of {len(stuck)} ranks: rank {rank}, step {step[rank]}: {action} never meets its partner")
