"""Data-parallel training on threads equals one process: NumPy and torch, sizes that do not divide, idle ranks."""

from __future__ import annotations

from itertools import product

import parity
import pytest
import torch

from hpctrain.transport.threads import run_threads

CASES = list(product(("adamw", "sgd"), (1, 2), (None, 0.5)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_module_equals_one_process(num_ranks: int, dtype: torch.dtype) -> None:
    for optimizer, accumulation, clip_norm in CASES:
        run_threads(num_ranks, lambda t: parity.torch_case(parity.context_of(t), optimizer, dtype, accumulation,
                                                           clip_norm))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numpy_network_equals_one_process(num_ranks: int, dtype: str) -> None:
    for optimizer, accumulation, clip_norm in CASES:
        run_threads(num_ranks, lambda t: parity.numpy_case(parity.context_of(t), optimizer, dtype, accumulation,
                                                           clip_norm))


def test_a_rank_without_samples_takes_part() -> None:
    run_threads(4, lambda t: parity.torch_case(parity.context_of(t), "adamw", torch.float64, 1, 0.5, num_samples=3))


def test_a_wrong_loss_weight_is_noticed() -> None:
    """The comparison can fail: a loss that reports half its weight gives other gradients."""
    def half(module: torch.nn.Module, batch: object) -> tuple[torch.Tensor, float]:
        loss_sum, weight = parity.torch_loss(module, batch)
        return loss_sum, weight / 2

    def run(transport: object) -> None:
        batches = parity.global_batches(2, 7, torch.float64)
        module = parity.TinyNet()
        optimizer = torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1)
        truth = parity.reference(module, parity.torch_loss, batches, optimizer, None)
        model = parity.hpctrain.torch.adapt(parity.TinyNet(), half)
        trace = parity.train(parity.context_of(transport), model, batches, 1, optimizer=parity.hpctrain.SGD(lr=0.1))
        with pytest.raises(AssertionError):
            parity.assert_same(trace, truth, 1e-10)

    run_threads(2, run)
