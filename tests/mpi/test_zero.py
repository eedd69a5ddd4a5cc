"""ZeRO over MPI equals one process, with shared memory and without: NumPy and torch."""

from __future__ import annotations

import parity
import pytest
import torch
from mpi4py import MPI

import hpctrain
from hpctrain.transport.mpi import MpiTransport

Zero = hpctrain.Zero
STAGES = [Zero(1, bucket_bytes=100), Zero(2, bucket_bytes=100), Zero(2, accumulate="buffer", bucket_bytes=100),
          Zero(3, "auto", bucket_bytes=100), Zero(3, "none", threshold=8, bucket_bytes=100)]


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"{z.stage}-{z.share}-{z.accumulate}")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_torch_module_equals_one_process(accumulation: int, zero: Zero) -> None:
    parity.torch_case(hpctrain.start(), "adamw", torch.float64, accumulation, 0.5, zero=zero)


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"{z.stage}-{z.share}-{z.accumulate}")
def test_numpy_network_equals_one_process(zero: Zero) -> None:
    parity.numpy_case(hpctrain.start(), "sgd", "float32", 2, 0.5, zero=zero)


def test_once_per_node_on_imitated_nodes() -> None:
    size = MPI.COMM_WORLD.size
    transport = MpiTransport(ranks_per_node=2 if size % 2 == 0 else 1)
    parity.torch_case(parity.context_of(transport), "adamw", torch.float64, 2, 0.5, zero=Zero(3, "node"))
    transport.close()
