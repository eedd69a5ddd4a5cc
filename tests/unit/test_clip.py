"""Norms of three kinds from partials of ranges, and clipping as one factor."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.errors import ConfigError
from hpctrain.optim.clip import NORMS, gradient_norm, norm_of, update_scale
from hpctrain.plan.split import bounds

ORDER = {"l1": 1, "l2": 2, "inf": np.inf}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9])
def test_partials_of_ranks_join_to_the_norm_of_the_whole(kind: str, num_ranks: int) -> None:
    gradient = np.random.default_rng(0).normal(size=7)
    norm = norm_of(kind)
    cuts = bounds(7, num_ranks)
    partials = [norm.partial(NumpyArrays(), [gradient[a:b]]) for a, b in pairwise(cuts)]
    total = {"sum": sum, "max": max}[norm.combine](partials)
    expected = np.linalg.norm(gradient / 5.0, ORDER[kind])
    assert gradient_norm(total, 5.0, norm) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("kind", NORMS)
def test_no_ranges_add_nothing_and_overflow_comes_through(kind: str) -> None:
    norm, arrays = norm_of(kind), NumpyArrays()
    assert norm.partial(arrays, []) == 0.0 == norm.partial(arrays, [np.zeros(0)])
    for order in (1, -1):
        assert math.isnan(norm.partial(arrays, [np.array([math.nan]), np.array([2.0])][::order]))
        assert norm.partial(arrays, [np.array([-math.inf]), np.array([2.0])][::order]) == math.inf
        assert not math.isfinite(gradient_norm(math.nan, 2.0, norm))
    assert math.isnan(gradient_norm(math.nan, 2.0, norm)) and gradient_norm(math.inf, 2.0, norm) == math.inf


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="'L2'.*legal are 'l2', 'l1' or 'inf'"):
        norm_of("L2")


def test_clipping_is_one_factor() -> None:
    norm = gradient_norm(36.0, 2.0)
    assert norm == 3.0
    assert update_scale(norm, 2.0, None) == 0.5 == update_scale(norm, 2.0, 3.0)
    assert update_scale(norm, 2.0, 1.5) == 0.25


def test_the_loss_scale_cancels() -> None:
    weight, loss_scale = 2.0, 1024.0
    norm = gradient_norm(36.0 * loss_scale**2, weight * loss_scale)
    assert norm == 3.0
    assert update_scale(norm, weight * loss_scale, 1.5) * loss_scale == 0.25


def test_equal_norms_on_two_ranks_are_not_added_up() -> None:
    """Gradients that are the same on two ranks, norm 0.8: each rank measures its half only, limit 1 clips nothing."""
    gradient = np.array([0.48, 0.64])
    total = sum(norm_of("l2").partial(NumpyArrays(), [gradient[r : r + 1]]) for r in range(2))
    assert gradient_norm(total, 1.0) == pytest.approx(0.8)
    assert update_scale(gradient_norm(total, 1.0), 1.0, 1.0) == 1.0
