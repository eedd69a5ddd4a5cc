"""Samples of a text, and the bigram entropy."""

import numpy as np
import pytest

from hpctrain.data.text import TokenWindows, bigram_entropy, validation_batches
from hpctrain.errors import ConfigError


def test_every_token_but_the_first_is_a_target_once():
    tokens = np.arange(11, dtype=np.uint8)
    windows = TokenWindows(tokens, 3)
    assert len(windows) == 3
    inputs, targets = windows.batch(np.array([0, 1, 2]))
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.reshape(-1).tolist() == list(range(1, 10))
    assert windows.batch(np.empty(0, np.int64))[0].shape == (0, 3)


def test_too_short_texts_and_wrong_ids_are_refused():
    with pytest.raises(ConfigError, match="too short"):
        TokenWindows(np.zeros(3, np.uint8), 3)
    with pytest.raises(ConfigError, match="too short"):
        TokenWindows(np.zeros(0, np.uint8), 3)
    with pytest.raises(ValueError, match=r"0\.\.0"):
        TokenWindows(np.zeros(4, np.uint8), 3).batch(np.array([1]))


@pytest.mark.parametrize("limit", [0, 5, 99])
@pytest.mark.parametrize("size", [1, 2, 3, 30])
def test_validation_does_not_depend_on_the_number_of_ranks(limit, size):
    windows = TokenWindows(np.arange(101, dtype=np.uint16), 5)
    seen = [int(x[0]) for rank in range(size)
            for inputs, _ in validation_batches(windows, 3, rank=rank, size=size, limit=limit) for x in inputs]
    expected = 5 if limit == 5 else 20
    assert len(seen) == expected
    assert seen == sorted(set(seen))
    assert seen[-1] >= 80  # spread over the text, not its beginning


def test_bigram_entropy_by_hand():
    assert bigram_entropy(np.frombuffer(b"abababab", np.uint8)) == 0  # the next byte is certain
    # a is followed once by a, once by b: 2 of 3 pairs cost ln 2; b by a: certain
    assert bigram_entropy(np.frombuffer(b"aaba", np.uint8)) == pytest.approx(2 / 3 * np.log(2))
    random = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint8)
    assert bigram_entropy(random) == pytest.approx(np.log(4), abs=1e-3)
    assert bigram_entropy(np.empty(0, np.uint8)) == 0


def test_no_bigram_table_does_better_on_the_text():
    tokens = np.random.default_rng(1).integers(0, 3, 500).astype(np.uint8)
    table = np.random.default_rng(2).dirichlet(np.ones(3), 3)
    loss = -np.log(table[tokens[:-1], tokens[1:]]).mean()
    assert bigram_entropy(tokens, 3) < loss
