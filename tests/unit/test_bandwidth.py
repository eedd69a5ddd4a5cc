"""ZeRO-Infinity's efficiency model: the points of its curves (arXiv 2104.07857, section 4)."""

from __future__ import annotations

import pytest

from hpctrain.plan.activations import checkpoint_bytes, num_transformer_parameters
from hpctrain.plan.bandwidth import (
    checkpoint_intensity,
    efficiency,
    gather_bandwidth,
    parameter_intensity,
    state_intensity,
    step_operations,
)

PEAK = 70e12


@pytest.mark.parametrize("intensity, bandwidth, percent", [
    (parameter_intensity(1, 1024), 70e9, 50.6), (state_intensity(2, 1024), 1.5e12, 91.6),
    (checkpoint_intensity(2048), 2e9, 58.4), (checkpoint_intensity(8192), 1.5e9, 80.8),
    (checkpoint_intensity(8192), 3e9, 89.4),
])
def test_points_of_the_curves(intensity: float, bandwidth: float, percent: float) -> None:
    assert 100 * efficiency(intensity, bandwidth, PEAK) == pytest.approx(percent, abs=0.1)


def test_intensities_are_operations_over_bytes() -> None:
    batch, length, layers, width = 3, 5, 7, 11
    count = num_transformer_parameters(layers, width)
    operations = step_operations(batch, length, count)
    assert operations == 2 * 4 * 12 * batch * length * layers * width**2
    assert parameter_intensity(batch, length) == operations / (4 * 2 * count) == length * batch
    assert state_intensity(batch, length) == operations / (2 * 16 * count) == length * batch / 4
    moved = 2 * checkpoint_bytes(batch, length, width, layers, interval=2)
    assert checkpoint_intensity(width, interval=2) == operations / moved == 24 * width * 2


def test_slices_over_all_ranks_use_all_links() -> None:
    assert gather_bandwidth(3e9, 16, sliced=True) == 48e9
    assert gather_bandwidth(3e9, 16, sliced=False) == 3e9
