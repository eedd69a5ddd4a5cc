"""Modules that use their parameters in every way that torch allows, for tests of adapters; and data for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Block(nn.Module):
    """Two matrices and a norm, with a residual."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x.clone() if self.in_place else x))))
        if self.in_place:
            x += y
            return x.mul_(0.5)
        return x + y


class Stack(nn.Module):
    """Blocks between two matrices; the blocks are called in the way that `call` says."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__, *, rounds: int = 1,
                 in_place: bool = False, num_frozen: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(in_place=in_place) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.call, self.rounds = call, rounds
        for part in [self.first, *self.blocks][:num_frozen]:
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = self.call(block, x)
        return self.last(x)


class InnerCheckpoint(nn.Module):
    """The checkpoint is inside of a unit, so its second forward runs without the unit's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)}) for _ in range(2))
        self.blocks = nn.ModuleList(_Checkpointing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(part["a"](x) for part in self.parts)


class _Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) * 2


class Ties(nn.Module):
    """One matrix in three places, of two of them in blocks; a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.again = self.first
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks[1][0].weight = self.last.weight
        self.blocks[0][0].weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(torch.tanh(self.again(x)))


class Attention(nn.Module):
    """torch's own transformer layers and a bare MultiheadAttention, whose forward reads a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        decoder = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(decoder, 2)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        y, _ = self.attention(x, memory, memory)
        return self.decoder(y, memory)


@dataclass
class Answer:
    """An output as a data class."""

    value: Tensor
    note: str


class Odd(nn.Module):
    """Parameters of its own, read before and after children; computed weights; nests and None as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.nested = _Nested()
        self.parts = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x * self.scale + self.shift)
        answers = self.nested({"x": [x]}, y=x)
        assert self.nested(None) is None
        first, second = answers["first"], answers["more"][0].value
        return first * self.parts[0] + second * self.parts[1] + self.scale * self.shift


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, nest: Any, y: Tensor | None = None) -> Any:
        if nest is None:
            return None
        x = self.linear(nest["x"][0])
        return {"first": x, "more": (Answer(functional.linear(y, self.linear.weight) * self.weight, "note"), 3)}


def whole_again(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def whole_again_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True) if x.requires_grad else block(x)


class _Router(Block):
    """Leaves a further loss as an attribute, whose graph reads parameters that the outputs' graph does not."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.loss: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = [self.router(torch.tanh(self.norm(x))).square().sum((1, 2), keepdim=True)]
        return y


class Routers(nn.Module):
    """Adds the blocks' further losses to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Router() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(block.loss[0] for block in self.blocks)


def _computed_weights() -> nn.Module:
    """The backward of what computes a weight may run after the gradient of the input, where that is a leaf."""
    stack = Stack(whole_again_reentrant)
    for block in stack.blocks:
        parametrizations.weight_norm(block.up)
        del block.norm
        block.norm = nn.Identity()
    return stack


#: Each makes a module that maps (samples, 4, WIDTH) to the same shape.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "rounds": lambda: Stack(rounds=2),
    "checkpoint": lambda: Stack(whole_again, rounds=2),
    "reentrant": lambda: Stack(whole_again_reentrant),
    "reentrant, frozen below": lambda: Stack(whole_again_reentrant, num_frozen=2),
    "inner checkpoint": InnerCheckpoint,
    "in place": lambda: Stack(in_place=True),
    "frozen below": lambda: Stack(num_frozen=3),
    "ties": Ties,
    "attention": Attention,
    "odd": Odd,
    "routers": Routers,
    "reentrant, computed weights": _computed_weights,
}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module with values from a generator of its own: ranks on threads share torch's default one."""
    module = MODULES[name]().to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def loss(module: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Summed squared error, and the number of elements."""
    x, y = batch
    return (module(x) - y).square().sum(), float(y.numel())


def batches(count: int, num_samples: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """(inputs, targets), each (num_samples, 4, WIDTH)."""
    generator = torch.Generator().manual_seed(12)
    return [tuple(torch.randn(num_samples, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
                  for _ in range(2)) for _ in range(count)]
