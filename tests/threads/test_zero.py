"""ZeRO on threads: all stages equal one process and each other, whatever is shared, accumulated, tied, frozen, empty."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.transport.threads import run_threads

Zero = hpctrain.Zero
STAGES = [Zero(stage, share, accumulate, threshold=8, bucket_bytes=100)
          for stage, share, accumulate in [(0, "auto", "reduce"), (1, "auto", "reduce"), (2, "auto", "reduce"),
                                           (2, "auto", "buffer"), (3, "node", "reduce"), (3, "node", "buffer"),
                                           (3, "none", "reduce"), (3, "none", "buffer")]]
NAMES = [f"{z.stage}-{z.share}-{z.accumulate}" for z in STAGES]


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_numpy_network_equals_one_process(num_ranks: int, zero: Zero) -> None:
    for optimizer, accumulation, dtype in [("adamw", 2, "float64"), ("sgd", 1, "float64"), ("adamw", 3, "float32")]:
        run_threads(num_ranks, lambda t: parity.numpy_case(parity.context_of(t), optimizer, dtype, accumulation, 0.5,
                                                           zero=zero))


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_torch_module_equals_one_process(num_ranks: int, zero: Zero) -> None:
    cases = [("adamw", torch.float64, 2, 7), ("sgd", torch.float64, 1, 3), ("adamw", torch.float32, 3, 7)]
    for optimizer, dtype, accumulation, num_samples in cases:  # 3 samples on 4 ranks: one has none
        run_threads(num_ranks, lambda t: parity.torch_case(parity.context_of(t), optimizer, dtype, accumulation, 0.5,
                                                           num_samples, zero=zero))
