"""Debug mode: ranks that call different collectives get the same error, and no data has moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.fingerprint import CheckedChannel, name_ranks
from hpctrain.collectives.recorder import Recorder
from hpctrain.errors import MismatchError
from hpctrain.transport.threads import run_threads


def checked(transport: Any) -> Group:
    channel = Recorder().channel("world", range(transport.size))
    return Group(transport, arrays_of, observer=CheckedChannel(channel, transport))


def on_ranks(num_ranks: int, function: Any) -> list[Any]:
    return run_threads(num_ranks, lambda transport: function(checked(transport)), timeout=10.0)


def refused(call: Any) -> str:
    with pytest.raises(MismatchError) as caught:
        call()
    return str(caught.value)


def test_different_lengths_and_calls_and_what_follows():
    def run(world: Group) -> list[str]:
        texts = []
        odd = world.rank == 2
        x = np.full(100 if odd else 101, 1.0 + world.rank, np.float32)
        texts.append(refused(lambda: world.all_reduce(x, name="gradients 7")))
        assert (x == 1 + world.rank).all(), "no data was moved"
        same = np.ones(4, np.float32)
        texts.append(refused(lambda: world.broadcast(same, root=2) if odd else world.all_reduce(same)))
        texts.append(refused(lambda: world.all_reduce(same, "max" if odd else "sum")))
        texts.append(refused(lambda: world.all_reduce(same.astype(np.int32) if odd else same)))
        texts.append(refused(lambda: world.exchange(1) if odd else world.barrier()))
        texts.append(refused(lambda: world.broadcast(same, root=int(odd))))
        assert (world.all_reduce(same) == 3).all(), "all ranks are still together"
        return texts

    everyone = on_ranks(3, run)
    assert everyone[0] == everyone[1] == everyone[2], "the same words on all ranks"
    lengths, calls, operations, dtypes, values, roots = everyone[0]
    assert lengths.startswith("operation 1 of group 'world' (ranks 0-2) is not the same on all its ranks")
    assert 'ranks 0-1: all_reduce sum of 101 x float32 "gradients 7", called at test_fingerprint.py:' in lengths
    assert 'rank 2: all_reduce sum of 100 x float32 "gradients 7", called at test_fingerprint.py:' in lengths
    assert "rank 2: broadcast from 2 of 4 x float32" in calls and "ranks 0-1: all_reduce sum of 4 x float32" in calls
    assert "all_reduce max" in operations and "x int32" in dtypes
    assert "ranks 0-1: barrier" in values and "rank 2: exchange" in values
    assert "ranks 0-1: broadcast from 0" in roots and "rank 2: broadcast from 1" in roots


def test_every_collective_passes_where_ranks_agree():
    def run(world: Group) -> None:
        x = np.arange(5, dtype=np.float64)
        for _ in range(2):
            world.all_reduce(x.copy())
            world.reduce_scatter(x)
            world.all_gather(np.ones(world.rank))  # lengths differ, legally
            world.gather(np.ones(world.rank), root=1)
            world.reduce(x.copy(), root=2)
            world.scatter(np.ones(1 + world.rank), np.ones(6) if world.rank == 1 else None, 1, counts=[1, 2, 3])
            world.all_to_all(np.ones(3 * world.rank), counts=[[rank] * 3 for rank in range(3)])
            world.broadcast(x.copy(), root=1)
            assert world.exchange(world.rank) == [0, 1, 2]
            assert world.on_root(lambda: "answer", root=2) == "answer"
            with world.agree():
                pass
            work = world.start_all_reduce(x)
            world.barrier()
            work.wait()
        pair = world.subgroup([0, 2])
        if pair is not None:
            text = refused(lambda: pair.all_reduce(np.ones(1 + pair.rank)))
            assert "group 'world.1' (ranks 0, 2)" in text and "rank 2: all_reduce sum of 2" in text
            pair.close()
        world.close()

    on_ranks(3, run)


def test_an_error_on_root_is_still_the_error():
    def fails() -> None:
        raise RuntimeError("no id")

    def run(world: Group) -> None:
        with pytest.raises(RuntimeError, match="rank 0: no id"):
            world.on_root(fails)
        world.barrier()

    on_ranks(3, run)


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert name_ranks(range(0, 100, 2)).endswith(", ...")
