"""Data-parallel training over MPI equals one process: NumPy and torch."""

from __future__ import annotations

import parity
import pytest
import torch

import hpctrain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_torch_module_equals_one_process(optimizer: str, accumulation: int, dtype: torch.dtype) -> None:
    parity.torch_case(hpctrain.start(), optimizer, dtype, accumulation, 0.5)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_numpy_network_equals_one_process(optimizer: str, dtype: str) -> None:
    parity.numpy_case(hpctrain.start(), optimizer, dtype, 2, 0.5)
