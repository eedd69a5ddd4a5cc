"""Small float32 adapters on a frozen bfloat16 base: parameters of two types, of which one kind is not trained."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads


class Adapted(torch.nn.Module):
    """`base` is frozen; what is trained is low-rank and added in float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 2

        self.base = torch.nn.Linear(7, 7).to(torch.bfloat16).requires_grad_(False)
        self.base.weight.data.copy_(numbers(7, 7))
        self.base.bias.data.copy_(numbers(7))
        self.down, self.up = torch.nn.Parameter(numbers(7, 2)), torch.nn.Parameter(numbers(2, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + x @ self.down @ self.up


def loss(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (module(x) ** 2).sum(), x.numel()


def batches(step: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(step))


def expected() -> dict[str, torch.Tensor]:
    """One process, plain torch."""
    model = Adapted()
    optimizer = torch.optim.AdamW([model.down, model.up], lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        total, weight = loss(model, batches(step))
        (total / weight).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero", [hpctrain.Zero(), hpctrain.Zero(stage=2), hpctrain.Zero(stage=3),
                                  hpctrain.Zero(stage=3, share="none", threshold=0)], ids=str)
def test_adapters_learn_and_the_base_stays(zero: hpctrain.Zero) -> None:
    truth = expected()

    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        trainer = Trainer(context, hpctrain.torch.adapt(Adapted(), loss), zero=zero,
                          optimizer=hpctrain.AdamW(lr=0.05, weight_decay=0.01))
        for step in range(3):
            trainer.step([batches(step)[context.rank :: context.size]])
        found = {name: torch.as_tensor(value) for name, value in trainer.parameters()}
        assert found["base.weight"].dtype == torch.bfloat16
        for name in ("base.weight", "base.bias"):
            assert torch.equal(found[name], truth[name].flatten())
        for name in ("down", "up"):
            assert torch.allclose(found[name], truth[name].flatten(), rtol=0, atol=2e-5), name
            assert not torch.equal(found[name], dict(Adapted().named_parameters())[name].flatten())
        names = {placement.name for region in trainer._flat.trained for placement in region.layout.slots}
        assert names == {"down", "up"}, "no gradient and no optimizer state for what is frozen"

    run_threads(2, run)
