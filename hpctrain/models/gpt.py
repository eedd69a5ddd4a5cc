"""A small GPT in torch: pre-norm blocks, causal attention, GELU, no dropout.

Owns the module, its loss and its way to write text. Must not know ranks or engines; the torch adapter makes a `Model`
of it as of any other module.

    tokens -> embedding (+ places) -> [ x + attention(norm(x)) -> x + mlp(norm(x)) ] x layers -> norm -> head -> logits
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.models.gpt_shape import GPTShape
from hpctrain.models.initial import normal

__all__ = ["GPT", "loss", "loss_of_logits", "tokens_of"]


class Block(nn.Module):
    """One transformer block; input and output have shape (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention, then the two-layer network, each added to the stream."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        if rotation is not None:
            query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """The network. Its values are a function of (seed, parameter name, element index), not of torch's generator."""

    def __init__(self, shape: GPTShape, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.place = nn.Embedding(shape.context, shape.width) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.to(dtype)
        self.set_initial_values(seed)

    @torch.no_grad()
    def set_initial_values(self, seed: int) -> None:
        """Matrices: normal of deviation 0.02; those that end in the stream smaller by sqrt(2 layers); norms: 1, 0."""
        residual = 0.02 / (2 * max(1, self.shape.layers)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                std = residual if name.endswith(("attention_out.weight", "mlp_out.weight")) else 0.02
                values = normal(seed, name, 0, parameter.numel(), std).reshape(parameter.shape)
                parameter.copy_(torch.from_numpy(values))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of the next token at every place of `tokens` (batch, length)."""
        x = _embed(self.shape.context, self.embedding, *([] if self.place is None else [self.place]), tokens)
        rotation = _angles(x, self.shape.heads) if self.place is None else None
        for block in self.blocks:
            x = block(x, rotation)
        return _logits(self.norm, self.head, x)

    def steps(self) -> list[tuple[tuple[str, ...], Callable[..., Tensor]]]:
        """The network as a chain for `hpctrain.torch.layers`: embedding, each block, norm and head."""
        first, block = (("embedding",), _turned) if self.place is None else (("embedding", "place"), _unturned)
        return [(first, partial(_embed, self.shape.context)),
                *(((f"blocks.{i}",), block) for i in range(len(self.blocks))), (("norm", "head"), _logits)]

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float = 1.0, seed: int = 0) -> bytes:
        """`count` bytes that go on from `prompt` (not empty). Temperature 0 takes the likeliest byte each time."""
        if not prompt:
            raise ValueError("prompt = b'' must hold at least one byte")
        device = self.embedding.weight.device
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            recent = torch.tensor([tokens[-self.shape.context:]], device=device)
            logits = self(recent)[0, -1].double().cpu()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                odds = torch.softmax(logits / temperature, 0)
                tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
        return bytes(tokens[len(prompt):])


def loss(module: nn.Module, micro_batch: tuple[Any, Any]) -> tuple[Tensor, int]:
    """Summed cross-entropy in nats, and its weight: the number of target tokens.

    `micro_batch`: inputs and targets (batch, length), torch or NumPy; they are moved to the module's device.
    """
    return loss_of_logits(module(_tensor(micro_batch[0]).to(next(module.parameters()).device)), micro_batch)


def loss_of_logits(logits: Tensor, micro_batch: tuple[Any, Any]) -> tuple[Tensor, int]:
    """As `loss`, of what the network gave: the loss of its last pipeline stage."""
    targets = _tensor(micro_batch[1]).to(logits.device)
    loss_sum = functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), reduction="sum")
    return loss_sum, targets.numel()


def tokens_of(micro_batch: tuple[Any, Any]) -> Tensor:
    """The network's input: what its first pipeline stage takes of a micro-batch."""
    return _tensor(micro_batch[0])


def _embed(context: int, embedding: nn.Module, *place_and_tokens: Any) -> Tensor:
    """The first step: tokens (batch, length) -> (batch, length, width)."""
    *place, tokens = place_and_tokens
    length = tokens.shape[1]
    if length > context:
        raise ValueError(f"length = {length} must be at most the model's context = {context}")
    x: Tensor = embedding(tokens)
    return x + place[0](torch.arange(length, device=x.device)) if place else x


def _unturned(block: Block, x: Tensor) -> Tensor:
    """A block where the embedding has the places."""
    return block(x, None)


def _turned(block: Block, x: Tensor) -> Tensor:
    """A block with rotary positions."""
    return block(x, _angles(x, block.heads))


def _logits(norm: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    """The last step."""
    logits: Tensor = head(norm(x))
    return logits


def _tensor(part: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(part)) if isinstance(part, np.ndarray) else torch.as_tensor(part)


def _angles(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, width of a head / 2) of rotary positions (Su et al., arXiv 2104.09864, section 3.2.2).

    `x` is (batch, length, width).
    """
    length, width = x.shape[1], x.shape[2] // heads
    speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * speeds
    return angles.cos().to(x), angles.sin().to(x)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + width/2]) by the angle of its place and pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
