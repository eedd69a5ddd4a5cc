"""The order of the samples: a permutation of every epoch, computed element by element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.order import permute, sample_ids


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(n, seed, epoch):
    ids = permute(np.arange(n), n, seed, epoch)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 1000, 4097])
def test_small_and_odd_sizes(n):
    for epoch in range(5):
        assert np.array_equal(np.sort(permute(np.arange(n), n, 1, epoch)), np.arange(n))


def test_a_stretch_is_the_slice_of_the_whole_across_epochs():
    n = 37
    whole = sample_ids(0, 4 * n, n, seed=3)
    for start, stop in [(0, 0), (5, 6), (30, 80), (36, 37), (37, 111), (148, 148)]:
        assert np.array_equal(sample_ids(start, stop, n, seed=3), whole[start:stop])


def test_seeds_and_epochs_differ_and_repeat():
    a = permute(np.arange(100), 100, 1, 0)
    assert np.array_equal(a, permute(np.arange(100), 100, 1, 0))
    assert not np.array_equal(a, permute(np.arange(100), 100, 2, 0))
    assert not np.array_equal(a, permute(np.arange(100), 100, 1, 1))


def test_no_place_prefers_a_sample():
    n, epochs = 5, 4000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), permute(np.arange(n), n, 7, epoch)] += 1
    expected = epochs / n
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 60  # 16 degrees of freedom: 39 at the 0.1 % level


def test_neighbours_are_torn_apart():
    n = 10_000
    ids = permute(np.arange(n), n, 0, 0).astype(float)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(np.arange(n), ids)[0, 1]) < 0.04


def test_huge_epochs_need_no_memory():
    n = 2**61 + 3
    ids = permute(np.array([0, 1, n - 1]), n, 0, 0)
    assert len(set(ids.tolist())) == 3
    assert (ids >= 0).all()
    assert (ids < n).all()
