"""Accumulation windows: case 17 of the case bank (loss w x, w = 1, SGD 0.1, x = 1..7, accumulation 4)."""

import pytest

from hpctrain.data.windows import windows
from hpctrain.errors import ConfigError


def train(xs, accumulation, epochs=1):
    """The weight after training and the number of updates, each with the mean gradient of its window."""
    w, updates = 1.0, 0
    for _ in range(epochs):
        for window in windows(iter(xs), accumulation):
            w -= 0.1 * sum(window) / len(window)
            updates += 1
    return w, updates


def test_the_tail_is_an_update_with_its_true_weight():
    assert list(windows(range(1, 8), 4)) == [[1, 2, 3, 4], [5, 6, 7]]
    w, updates = train(range(1, 8), 4)
    assert updates == 2
    assert w == pytest.approx(0.15)


def test_nothing_leaks_into_the_next_epoch():
    w, updates = train([1, 2, 3], 4, epochs=2)
    assert updates == 2
    assert w == pytest.approx(1 - 0.1 * 2 - 0.1 * 2)


def test_fewer_batches_than_a_window_are_one_update():
    assert list(windows([1, 2, 3], 4)) == [[1, 2, 3]]
    assert list(windows([], 4)) == []
    assert list(windows([1, 2], 1)) == [[1], [2]]


@pytest.mark.parametrize("accumulation", [0, -1, 1.5, True])
def test_illegal_accumulation_is_refused_at_once(accumulation):
    with pytest.raises(ConfigError, match="accumulation"):
        windows([1], accumulation)


def test_batches_are_taken_from_the_loader_as_they_are_needed():
    taken = []
    source = (taken.append(i) or i for i in range(9))
    assert next(windows(source, 2)) == [0, 1]
    assert taken == [0, 1]
