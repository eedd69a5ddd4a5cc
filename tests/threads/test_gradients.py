"""Gradients complete in any order, another one on each rank; buckets start in one order all the same, and add up."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.collectives import Group
from hpctrain.collectives.progress import Progress
from hpctrain.collectives.recorder import Channel, Recorder
from hpctrain.plan.placement import Placement
from hpctrain.transport.threads import run_threads
from hpctrain.zero.gradients import Gradients
from hpctrain.zero.options import Zero
from hpctrain.zero.regions import Types, make_regions

COUNTS = {f"p{i}": 7 * (i % 4) + i for i in range(12)}  # p0 has none; nothing divides
STEPS = 3
KINDS = {"all": (True, True), "own, whole": (True, False), "own, windows": (False, False)}


def regions_of(num_ranks: int, accumulate: str = "float64", reduce: str = "float64") -> Any:
    placements = [Placement(name, (count,), "float64") for name, count in COUNTS.items()]
    types = Types("float64", accumulate, reduce, "float64")
    return make_regions(placements, [list(COUNTS)], lambda dtype: types, Zero(bucket_bytes=300), False, num_ranks)


def one_step(gradients: Gradients, rank: int, num_rounds: int, draw: random.Random) -> tuple[set[str], dict[str, int]]:
    """Delivers in a random order, some not at all; gives what never came, and the sums of what did."""
    gradients.start()
    sums = dict.fromkeys(COUNTS, 0)
    seen: set[str] = set()
    own_rounds = draw.randint(0, num_rounds) if rank else num_rounds  # some ranks have less data
    for i in range(num_rounds - own_rounds if gradients.in_rounds else 0):
        gradients.begin(completes=i == num_rounds - 1)
        gradients.end()
    for i in range(own_rounds):
        gradients.begin(completes=i == own_rounds - 1)
        for name in draw.sample(sorted(COUNTS), len(COUNTS)):
            if draw.random() < 0.8:
                value = draw.randint(1, 9)
                gradients.deliver(name, np.full(COUNTS[name], float(value)))
                sums[name] += value
                seen.add(name)
                time.sleep(draw.choice([0, 0, 0.001]))
        gradients.end()
    return COUNTS.keys() - seen, sums


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("num_ranks", range(1, 5))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_any_order_on_any_rank(kind: str, num_ranks: int, num_rounds: int, threaded: bool) -> None:
    progress = Progress()
    whole, to_all = KINDS[kind]
    (region,) = regions_of(num_ranks)

    def run(transport: Any) -> Any:
        rank = transport.rank
        channel: Channel = Recorder().channel("world", range(transport.size))
        group = Group(transport, arrays_of, segment_bytes=64, observer=channel)
        group.progress_by(progress if threaded else None)
        gradients = Gradients(group, NumpyArrays(), [region], whole=whole, to_all=to_all)
        draw, told = random.Random(100 * num_rounds + rank), []
        for _ in range(STEPS):
            missed, sums = one_step(gradients, rank, num_rounds, draw)
            assert gradients.finish() == missed
            ranges = region.shards.owned(rank) if not to_all else ((0, region.layout.count),)
            told.append((sums, [(r, gradients.held[0].piece(*r).copy()) for r in ranges]))
        return told, [o.name for o in channel.tail() if "reduce" in o.operation]

    try:
        told = run_threads(num_ranks, run, timeout=20.0)
    finally:
        progress.close()
    for step in range(STEPS):
        expected = np.zeros(region.layout.count)
        for slot in region.layout.slots:
            expected[slot.start : slot.stop] = sum(steps[step][0][slot.name] for steps, _ in told)
        for steps, _ in told:
            for (start, stop), got in steps[step][1]:
                np.testing.assert_array_equal(got, expected[start:stop])
    for _, titles in told:
        rounds = STEPS * (num_rounds if kind == "own, windows" else 1) * (num_ranks > 1)
        expected_titles = [f"gradients {i}" for i in range(len(region.shards.buckets))] * rounds
        assert [title.split(":")[0] for title in titles] == expected_titles[-len(titles) :]


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_kept_wide_and_sent_narrow(kind: str) -> None:
    whole, to_all = KINDS[kind]
    (region,) = regions_of(2, "float64", "float32")

    def run(transport: Any) -> None:
        gradients = Gradients(Group(transport, arrays_of), NumpyArrays(), [region], whole=whole, to_all=to_all)
        gradients.start()
        for i in range(2):
            gradients.begin(completes=i == 1)
            for name, count in COUNTS.items():
                gradients.deliver(name, np.full(count, (0.0, 1 + 2.0**-40)[i]))
            gradients.end()
        gradients.finish()
        for start, stop in region.shards.owned(transport.rank):
            got = gradients.held[0].piece(start, stop)
            assert got.dtype == np.float64 and set(got) <= {0.0, 2.0}  # what float32 cannot hold was lost on the way

    run_threads(2, run)
