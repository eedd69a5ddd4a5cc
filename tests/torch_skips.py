"""Models that are no chains, for tests of how they are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Skips(nn.Module):
    """A U: values of early parts go to late ones. Dropout, running statistics, a tie, a frozen part, a constant."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(2, 2)
        self.up[2].weight = self.down[0].weight
        self.down[1].requires_grad_(False)
        self.register_buffer("mask", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.factor = torch.tensor(0.5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        y = x
        for part in self.down:
            y = torch.tanh(part(y))
            kept.append(y)
        y = self.dropout(self.norm(y))
        for part in self.up:
            y = torch.tanh(part(y)) + kept.pop() * self.mask
            y += self.factor  # in place: into what an earlier piece made, where a cut is before the next part
        return y * x.shape[0] + x


def make(dropout: float = 0.0) -> Skips:
    """In float64, the same each time."""
    model = Skips(dropout).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def batches(sizes: Any) -> list[Any]:
    """(inputs, targets) of so many rows each."""
    generator = torch.Generator().manual_seed(6)
    return [tuple(torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)) for n in sizes]
