"""Cuts of layers into stages: equal to trying all of them."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.partition import (
    Layer,
    balanced,
    by_parameters,
    by_time,
    cut_costs,
    explicit,
    slowest,
    uniform,
)


def all_bounds(num_layers, num_stages):
    return [(0, *inner, num_layers) for inner in combinations_with_replacement(range(num_layers + 1), num_stages - 1)]


def by_hand(bounds, weights, cuts, overlap):
    times = []
    for start, stop in pairwise(bounds):
        ends = [cuts[start], cuts[stop]] if cuts else [0, 0]
        times += [sum(weights[start:stop]), *ends] if overlap else [sum(weights[start:stop]) + sum(ends)]
    return max(times)


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4), st.booleans(), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_slowest_stage_is_as_fast_as_can_be(weights, stages, with_cuts, overlap, data):
    size = len(weights) + 1
    cuts = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)) if with_cuts else None
    bounds = balanced(weights, stages, cuts, overlap=overlap)
    everything = all_bounds(len(weights), stages)
    assert bounds in everything
    best = min(by_hand(b, weights, cuts, overlap) for b in everything)
    assert by_hand(bounds, weights, cuts, overlap) == slowest(bounds, weights, cuts, overlap=overlap) == best

    def squares(b):
        return sum(by_hand((s, t), weights, cuts and {s: cuts[s], t: cuts[t]}, overlap) ** 2 for s, t in pairwise(b))

    assert squares(bounds) == min(squares(b) for b in everything if by_hand(b, weights, cuts, overlap) == best)


@pytest.mark.parametrize("layers, stages, bounds", [
    (10, 4, (0, 3, 6, 8, 10)), (30, 4, (0, 8, 16, 23, 30)), (2, 4, (0, 1, 2, 2, 2)), (0, 2, (0, 0, 0)), (3, 1, (0, 3)),
])
def test_remainders_are_spread(layers, stages, bounds):
    assert uniform(layers, stages) == balanced([1] * layers, stages) == bounds


def test_what_is_balanced():
    heavy = Layer(1, 2, 100, 8000)
    layers = [heavy, Layer(1, 2, 100, 10), Layer(1, 2, 100, 10), Layer(1, 2, 100, 10)]
    assert by_parameters(layers, 2) == (0, 1, 4)
    assert by_time(layers, 2) == (0, 2, 4)
    frozen = [Layer(1, 0, 100), Layer(1, 0, 100), Layer(1, 0, 100), Layer(1, 2, 100)]
    assert by_time(frozen, 2) == (0, 3, 4)
    assert by_time([Layer()] * 4, 2) == (0, 2, 4)  # nothing measured: by number


def test_communication_moves_the_cut():
    layers = [Layer(1, 1, 10), Layer(1, 1, 400), Layer(1, 1, 10), Layer(1, 1, 10)]
    assert by_time(layers, 2) == (0, 2, 4)
    assert cut_costs(layers, 100) == [0, 0.2, 8, 0.2, 0]
    assert by_time(layers, 2, 100) in ((0, 1, 4), (0, 3, 4))
    assert by_time(layers, 2, 100, overlap=True) in ((0, 1, 4), (0, 3, 4))
    assert by_time(layers, 2, 1000, overlap=True) == (0, 2, 4)  # 0.8 beside 4 does not count
    assert cut_costs([], 1) == [0]


def test_explicit():
    assert explicit([3, 2, 0, 3], 8) == (0, 3, 5, 5, 8)
    for sizes in ([3, 2], [9, -1]):
        with pytest.raises(ConfigError, match=r"at least 0 and add up to the 8 layers"):
            explicit(sizes, 8)


def test_refused():
    for make in (lambda: uniform(3, 0), lambda: balanced([1], 0), lambda: explicit([], 0)):
        with pytest.raises(ConfigError, match="at least one stage"):
            make()
    with pytest.raises(ConfigError, match="at least 0"):
        balanced([1, -1], 1)
    with pytest.raises(ConfigError, match="2 layers have 3 places for a cut, not 2"):
        balanced([1, 1], 1, [0, 0])
    with pytest.raises(ConfigError, match="bandwidth = 0"):
        by_time([Layer()], 1, 0)
