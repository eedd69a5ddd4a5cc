"""Fair timing among the ranks of a group: all contenders in every round, call by call.

Owns how a sample is taken. A machine changes its mood within seconds, so only contenders that alternate can be
compared, and what ran before leaves its traces in the caches, so each round has an order of its own. Must not know what
is measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpctrain.collectives import Group

__all__ = ["alternate", "copy_seconds"]

Call = Callable[[], object]

_SAMPLE_SECONDS = 1e-3  # a sample is as many calls as fill this time, so that the clock and the barrier do not count
_MOST_CALLS = 50
_WARMUP_ROUNDS = 2


def alternate(group: Group, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each contender, `rounds` of them, the slowest rank counting. Collective over the group."""
    num_calls = _calls_a_sample(group, calls)
    names = list(calls)
    mine: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    order = list(calls)
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            mine[name].append(_sample(group, calls[name], num_calls[name]))
    everyone = group.exchange([mine[name] for name in names])
    return {name: _slowest([ranks[k] for ranks in everyone]) for k, name in enumerate(names)}


def copy_seconds(group: Group, num_bytes: int, rounds: int) -> list[float]:
    """Seconds in which this many bytes are copied by each rank, all at the same time. Collective over the group."""
    source, target = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    source.fill(1)
    return alternate(group, {"copy": lambda: np.copyto(target, source)}, rounds)["copy"]


def _calls_a_sample(group: Group, calls: Mapping[str, Call]) -> dict[str, int]:
    """Agreed by all ranks, from rounds that also warm everything up."""
    fastest = dict.fromkeys(calls, float("inf"))
    for _ in range(_WARMUP_ROUNDS):
        for name, call in calls.items():
            fastest[name] = min(fastest[name], _sample(group, call, 1))
    slowest = [max(times) for times in zip(*group.exchange(list(fastest.values())), strict=True)]
    return {name: max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(seconds, 1e-9))))
            for name, seconds in zip(calls, slowest, strict=True)}


def _sample(group: Group, call: Call, num_calls: int) -> float:
    group.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*ranks, strict=True)]
