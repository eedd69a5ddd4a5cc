"""Gradients complete in any order, another one on each rank; buckets start in one order all the same."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.progress import Progress
from hpctrain.collectives.recorder import Channel, Recorder
from hpctrain.plan.flat import Bucket
from hpctrain.transport.threads import run_threads
from hpctrain.zero.reduction import GradientReduction

NAMES = [f"p{i}" for i in range(12)]  # parameter i is flat[10 * i:10 * i + 10]
CUTS = [(9, 12), (8, 9), (3, 8), (0, 3)]  # the buckets, in parameters, in starting order
STEPS = 4


def one_step(reduction: GradientReduction, flat: np.ndarray, rank: int, draw: random.Random) -> set[str]:
    """Writes and reports gradients in a random order; returns what was not reported, where they stay 0."""
    order = draw.sample(range(len(NAMES)), len(NAMES))
    missing = {i for i in order if draw.random() < 0.2}
    flat[:] = 0
    for i in order:
        if i not in missing:
            flat[10 * i : 10 * i + 10] += (rank + 1) * (i + 1)
            reduction.ready(NAMES[i])
            time.sleep(draw.choice([0, 0, 0.001]))
    return {NAMES[i] for i in missing}


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("num_ranks", range(1, 5))
@pytest.mark.parametrize("seed", range(4))
def test_any_order_on_any_rank(seed: int, num_ranks: int, threaded: bool) -> None:
    progress = Progress()

    def run(transport: Any) -> Any:
        rank = transport.rank
        channel: Channel = Recorder().channel("world", range(transport.size))
        group = Group(transport, arrays_of, segment_bytes=64, observer=channel)
        group.progress_by(progress if threaded else None)
        flat = np.zeros(10 * len(NAMES))
        buckets = [(flat, Bucket(10 * a, 10 * b, frozenset(NAMES[a:b]))) for a, b in CUTS]
        reduction, draw = GradientReduction(group, buckets), random.Random(100 * seed + rank)
        missed, results = [], []
        for _ in range(STEPS):
            missed.append(one_step(reduction, flat, rank, draw))
            assert reduction.finish() == missed[-1]
            results.append(flat.copy())
        return missed, results, [o.name for o in channel.tail() if o.operation.startswith("all_reduce")]

    try:
        told = run_threads(num_ranks, run, timeout=20.0)
    finally:
        progress.close()
    for step in range(STEPS):
        expected = np.zeros(10 * len(NAMES))
        for rank, (missed, _, _) in enumerate(told):
            for i, name in enumerate(NAMES):
                expected[10 * i : 10 * i + 10] += 0 if name in missed[step] else (rank + 1) * (i + 1)
        for _, results, _ in told:
            np.testing.assert_array_equal(results[step], expected)
    for _, _, titles in told:
        assert [title.split(":")[0] for title in titles] == \
            [f"gradients {i}" for i in range(len(CUTS))] * STEPS * (num_ranks > 1)
