"""Samples of each rank and update; case 49 of the case bank: resumed in the middle, twice, in the second epoch."""

from itertools import islice

import numpy as np
import pytest

from hpctrain.data.order import sample_ids
from hpctrain.data.sampler import Sampler
from hpctrain.data.windows import windows
from hpctrain.errors import ConfigError


def history(start, num_updates, *, size, n=64, batch=4, accumulation=1, tail="straddle"):
    """(global batches of all ranks together, counter to resume from)."""
    samplers = [Sampler(n, batch, rank=r, size=size, seed=5, accumulation=accumulation, start=start, tail=tail)
                for r in range(size)]
    updates = [list(islice(s, num_updates)) for s in samplers]
    states = {s.state(num_updates) for s in samplers}
    assert len(states) == 1
    joined = [sorted(int(i) for rank in range(size) for ids in updates[rank][k] for i in ids)
              for k in range(num_updates)]
    return joined, states.pop()


def test_case_49_order_over_three_resumes_on_other_numbers_of_ranks():
    unbroken, _ = history(0, 40, size=1)
    first, state = history(0, 5, size=2)  # stop after 20 samples
    assert state == 20
    second, state = history(state, 2, size=2, accumulation=2)  # 8 more
    third, state = history(state, 13, size=2)  # into epoch 2
    assert state == 80
    fourth, state = history(state, 20, size=3, accumulation=2)
    assert first + second + third + fourth == unbroken
    seen = [i for update in unbroken for i in update]
    assert sorted(seen[:64]) == sorted(seen[64:128]) == list(range(64))
    assert seen[:64] != seen[64:128]


def test_a_prefetching_loader_does_not_move_the_state():
    sampler = Sampler(64, 4, rank=0, size=2, seed=5)
    list(islice(sampler, 9))
    assert sampler.state(2) == 8


@pytest.mark.parametrize("tail", ["straddle", "keep", "drop"])
@pytest.mark.parametrize("start", [0, 3, 9, 10, 24])
def test_state_is_where_the_next_update_begins(tail, start):
    reference = Sampler(10, 4, rank=0, size=1, seed=1, start=start, tail=tail)
    updates = [np.concatenate(u).tolist() for u in islice(reference, 12)]
    for k in range(11):
        resumed = Sampler(10, 4, rank=0, size=1, seed=1, start=reference.state(k), tail=tail)
        assert [np.concatenate(u).tolist() for u in islice(resumed, 12 - k)] == updates[k:]


def test_tails():
    def sizes(tail):
        return [sum(map(len, u)) for u in islice(Sampler(10, 4, rank=0, size=1, seed=1, tail=tail), 6)]

    assert sizes("straddle") == [4] * 6
    assert sizes("keep") == [4, 4, 2, 4, 4, 2]
    assert sizes("drop") == [4] * 6
    kept = Sampler(10, 4, rank=0, size=1, seed=1, tail="keep")
    assert sorted(np.concatenate([i for u in islice(kept, 3) for i in u])) == list(range(10))
    dropped = list(islice(Sampler(10, 4, rank=0, size=1, seed=1, tail="drop"), 3))
    assert np.array_equal(dropped[2][0], sample_ids(10, 14, 10, 1))  # the second epoch begins at its beginning
    assert [Sampler(10, 4, rank=0, size=1, seed=1, tail=t).updates_per_epoch for t in ("straddle", "keep", "drop")] \
        == [2.5, 3, 2]


def test_ranks_may_get_fewer_samples_or_none():
    per_rank = [next(iter(Sampler(10, 3, rank=r, size=5, seed=0, accumulation=2))) for r in range(5)]
    assert [sum(map(len, u)) for u in per_rank] == [1, 1, 1, 0, 0]
    assert per_rank[4] == []
    all_ids = np.concatenate([ids for u in per_rank for ids in u])
    assert sorted(all_ids) == sorted(sample_ids(0, 3, 10, 0))


def test_accumulation_splits_and_end_stops():
    sampler = Sampler(8, 6, rank=0, size=1, seed=0, accumulation=3, end=16)
    updates = list(sampler)
    assert [[len(ids) for ids in u] for u in updates] == [[2, 2, 2], [2, 2, 2], [2, 1, 1]]
    assert sampler.state(3) == sampler.state(99) == 16


def test_flat_micro_batches_feed_a_loader_and_windows_group_them_again():
    sampler = Sampler(10, 4, rank=1, size=2, seed=0, accumulation=2, end=20)
    flat = sampler.micro_batches()
    assert list(flat) == list(flat)
    grouped = list(windows(flat, 2))
    assert grouped == [[ids.tolist() for ids in update] for update in sampler]
    assert all(isinstance(i, int) for window in grouped for batch in window for i in batch)


def test_flat_micro_batches_refuse_tails_that_leave_a_rank_without():
    kept = Sampler(10, 4, rank=0, size=2, seed=0, accumulation=2, tail="keep")
    with pytest.raises(ConfigError, match="2 samples"):
        kept.micro_batches()
    with pytest.raises(ConfigError, match="2 samples"):
        Sampler(10, 4, rank=0, size=2, seed=0, accumulation=2, end=10).micro_batches()
    with pytest.raises(ConfigError, match="1 samples"):
        Sampler(13, 4, rank=0, size=2, seed=0, tail="keep", start=12).micro_batches()


def test_it_is_the_batch_sampler_of_a_torch_loader():
    data = pytest.importorskip("torch.utils.data")
    sampler = Sampler(10, 4, rank=1, size=2, seed=0, accumulation=2, end=20)
    loader = data.DataLoader(range(100, 110), batch_sampler=sampler.micro_batches())
    grouped = [[(batch - 100).tolist() for batch in window] for window in windows(loader, 2)]
    assert grouped == [[ids.tolist() for ids in update] for update in sampler]


@pytest.mark.parametrize("wrong", [{"accumulation": 0}, {"start": -1}, {"tail": "cut"}, {"global_batch": 0},
                                   {"num_samples": 0}, {"tail": "drop", "global_batch": 11}])
def test_illegal_values(wrong):
    values = {"num_samples": 10, "global_batch": 2, "rank": 0, "size": 1, "seed": 0} | wrong
    with pytest.raises(ConfigError):
        Sampler(**values)
