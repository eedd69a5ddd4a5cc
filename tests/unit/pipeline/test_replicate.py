"""PipeDream's partitioner against trying everything."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.partition import Layer
from hpctrain.plan.pipeline.replicate import Stage, replicate, slowest_stage, stage_time

layers_of = st.lists(st.builds(Layer, st.integers(0, 9), st.integers(0, 9), st.integers(0, 50), st.integers(0, 90)),
                     min_size=1, max_size=8)


def everything(num_layers, num_workers, most):
    for count in range(1, num_layers + 1):
        for inner in combinations(range(1, num_layers), count - 1):
            for replicas in product(range(1, most + 1), repeat=count):
                if sum(replicas) == num_workers:
                    ends = pairwise((0, *inner, num_layers))
                    yield [Stage(start, stop, r) for (start, stop), r in zip(ends, replicas)]


def by_hand(layers, stages, bandwidth):
    times = []
    for stage in stages:
        inside, m = layers[stage.start:stage.stop], stage.replicas
        times.append(max(sum(x.forward + x.backward for x in inside),
                         sum(4 * (m - 1) * x.parameter_bytes / m / bandwidth for x in inside)) / m)
        if stage is not stages[-1]:
            times.append(2 * inside[-1].activation_bytes / bandwidth)
    return max(times)


@given(layers_of, st.integers(1, 4), st.sampled_from([1.0, 7.0, 40.0]), st.sampled_from([None, 1, 2]))
@settings(max_examples=100, deadline=None)
def test_equals_brute_force(layers, workers, bandwidth, most):
    options = list(everything(len(layers), workers, workers if most is None else most))
    if not options:
        with pytest.raises(ConfigError, match="workers are more than"):
            replicate(layers, workers, bandwidth, most)
        return
    found = replicate(layers, workers, bandwidth, most)
    best = min(by_hand(layers, stages, bandwidth) for stages in options)
    assert list(found.stages) in options
    assert found.slowest == pytest.approx(best, rel=1e-12)
    assert by_hand(layers, found.stages, bandwidth) == pytest.approx(best, rel=1e-12)
    assert slowest_stage(layers, found.stages, bandwidth) == found.slowest


def test_vgg_is_replicated_in_front():
    """Activations shrink, weights lie at the end: convolutions on seven workers, the last layers on one."""
    convolutions = [Layer(1, 2, 3_200_000 >> i, 2_000 << i) for i in range(8)]
    vgg = [*convolutions, Layer(0.6, 1.2, 4_000, 100_000_000), Layer(0.2, 0.4, 1_000, 4_000_000)]
    found = replicate(vgg, 8, 5e6)
    assert [stage.replicas for stage in found.stages] == [7, 1]
    assert found.stages[0].stop == 8
    straight = replicate(vgg, 8, 5e6, max_replicas=1)
    assert [stage.replicas for stage in straight.stages] == [1] * 8
    assert straight.slowest > found.slowest


def test_one_stage():
    layers = [Layer(2, 4, 0, 30)]
    assert stage_time(layers, Stage(0, 1, 1), 10) == 6
    assert stage_time(layers, Stage(0, 1, 3), 1) == 4 * 2 / 3 * 30 / 3  # the weights take longer
    assert replicate(layers, 3, 1e9).stages == (Stage(0, 1, 3),)


def test_fewest_stages_among_equals():
    assert replicate([Layer(1, 1), Layer(1, 1)], 2, 1.0).stages == (Stage(0, 2, 2),)


def test_refused():
    for arguments in (([Layer()], 0, 1.0), ([Layer()], 1, 0.0), ([Layer()], 1, 1.0, 0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            replicate(*arguments)
    with pytest.raises(ConfigError, match="1 workers are more than 0 layers"):
        replicate([], 1, 1.0)
