"""The truth that every parallel form is compared with: plain torch, one process, the whole global batch.

Nothing of hpctrain is used by `reference`. `train` runs the same model and data through a Trainer on any context;
samples are split unevenly over ranks and micro-batches, some of which may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import hpctrain
import hpctrain.numpy
import hpctrain.torch
from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.recorder import Recorder
from hpctrain.plan.split import part
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.step import Trainer

VOCAB, WIDTH = 7, 5


@dataclass
class Trace:
    """What is compared: loss and norm of each update, gradients after the first, weights after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


class TinyNet(torch.nn.Module):
    """Tied ends, a layer used twice, an unused one, a frozen one, a zero-size parameter; nothing divides evenly."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.down = torch.nn.Linear(WIDTH, 3)
        self.up = torch.nn.Linear(3, WIDTH)
        self.unused = torch.nn.Linear(2, 3)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH)
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.head = torch.nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)
        generator = torch.Generator().manual_seed(3)  # of its own: ranks on threads share the default one
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + self.up(torch.tanh(self.down(x)))
        return self.head(self.frozen(x))


def torch_loss(module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Summed cross-entropy over the tokens that count (mask)."""
    tokens, targets, mask = batch
    terms = torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return (terms * mask.flatten()).sum(), float(mask.sum())


def global_batches(num_updates: int, num_samples: int, dtype: torch.dtype) -> list[Any]:
    """(tokens, targets, mask), each (num_samples, 4); samples count 1 to 4 tokens."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(num_updates):
        tokens = torch.randint(VOCAB, (num_samples, 5), generator=generator)
        lengths = torch.randint(1, 5, (num_samples, 1), generator=generator)
        result.append((tokens[:, :-1], tokens[:, 1:], (torch.arange(4) < lengths).to(dtype)))
    return result


def reference(module: torch.nn.Module, loss: Callable[..., Any], batches: Sequence[Any],
              optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Trace:
    """Trains on whole global batches in this process. A gradient that never comes counts as zero."""
    trace = Trace()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for batch in batches:
        for p in trained.values():
            p.grad = torch.zeros_like(p)
        loss_sum, weight = loss(module, batch)
        (loss_sum / weight).backward()
        if not trace.gradients:
            trace.gradients = {n: p.grad.numpy().copy() for n, p in trained.items()}
        trace.losses.append(loss_sum.item() / weight)
        trace.norms.append(clip(trained, clip_norm))
        optimizer.step()
    trace.weights = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
    return trace


def clip(trained: dict[str, Any], clip_norm: float | None) -> float:
    """The L2 norm of all gradients, and scaling to it where it is larger (torch's own adds 1e-6 to the norm)."""
    norm = float(sum(p.grad.double().square().sum() for p in trained.values()).sqrt())
    if clip_norm is not None and norm > clip_norm:
        for p in trained.values():
            p.grad.mul_(clip_norm / norm)
    return norm


def micro_batches(batch: Any, rank: int, size: int, accumulation: int) -> list[Any]:
    """This rank's uneven share of a global batch, cut into micro-batches; empty ones are left out."""
    start, stop = part(len(batch[0]), size, rank)
    cuts = [part(stop - start, accumulation, i) for i in range(accumulation)]
    return [tuple(t[start + a : start + b] for t in batch) for a, b in cuts if a < b]


def train(context: Any, model: Any, batches: Sequence[Any], accumulation: int, **options: Any) -> Trace:
    """The same through a Trainer. Collective over the context."""
    trainer = Trainer(context, model, **options)
    trace = Trace()
    for batch in batches:
        result = trainer.step(micro_batches(batch, context.rank, context.size, accumulation))
        if not trace.gradients:
            trace.gradients = {n: np.asarray(g) for n, g in trainer.gradients()}
        trace.losses.append(result.loss)
        trace.norms.append(result.gradient_norm)
    shapes = {p.name: p.shape for p in model.placements}
    trace.weights = {name: _numpy(w).reshape(shapes[name]) for name, w in trainer.parameters()}
    return trace


def _numpy(array: Any) -> np.ndarray:
    """NumPy has no bfloat16; float32 holds its values."""
    return np.asarray(array.float() if array.dtype == torch.bfloat16 else array)


def assert_same(trace: Trace, truth: Trace, tolerance: float) -> None:
    """Loss, norm, every gradient, every weight, relative to the largest element."""
    np.testing.assert_allclose(trace.losses, truth.losses, rtol=tolerance)
    np.testing.assert_allclose(trace.norms, truth.norms, rtol=tolerance)
    for kind in ("gradients", "weights"):
        mine, theirs = getattr(trace, kind), getattr(truth, kind)
        assert mine.keys() == theirs.keys(), f"{kind}: {mine.keys() ^ theirs.keys()}"
        for name, value in theirs.items():
            atol = tolerance * float(np.max(np.abs(value), initial=1e-3))
            got = mine[name].reshape(value.shape)
            np.testing.assert_allclose(got, value, rtol=0, atol=atol, err_msg=f"{kind}: {name}")


def context_of(transport: Any) -> Any:
    """A context over any transport, for engines on threads."""
    recorder = Recorder()
    group = Group(transport, arrays_of, observer=recorder.channel("world", range(transport.size)))
    return SimpleNamespace(world=group, rank=group.rank, size=group.size, stop_requested=False, description=dict,
                           host="host", recorder=recorder, watch=Watch())


def options_of(name: str) -> tuple[Any, Callable[[Any], torch.optim.Optimizer]]:
    """An optimizer of ours and the same one of torch."""
    return {
        "adamw": (hpctrain.AdamW(lr=0.02, weight_decay=0.1),
                  lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1)),
        "sgd": (hpctrain.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
                lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    }[name]


def torch_case(context: Any, optimizer: str, dtype: torch.dtype, accumulation: int, clip_norm: float | None,
               num_samples: int = 7, zero: Any = None) -> None:
    """A torch module through the Trainer equals one process."""
    ours, theirs = options_of(optimizer)
    batches = global_batches(5, num_samples, dtype)
    module = TinyNet(dtype)
    truth = reference(module, torch_loss, batches, theirs(p for p in module.parameters() if p.requires_grad), clip_norm)
    model = hpctrain.torch.adapt(TinyNet(dtype), torch_loss)
    trace = train(context, model, batches, accumulation, optimizer=ours, clip_norm=clip_norm,
                  zero=zero or hpctrain.Zero(bucket_bytes=100))
    assert_same(trace, truth, 1e-10 if dtype == torch.float64 else 2e-5)


class TorchTwin(torch.nn.Module):
    """The torch twin of `numpy_network`, parameter by parameter under the same names."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(network.parameter(p.name)))
                                             for p in network.placements)
        self.names = [p.name for p in network.placements]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(zip(self.names, self.values, strict=True))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        p = dict(self.named_parameters())
        x = p["0.weight"][tokens].flatten(1)
        x = torch.nn.functional.gelu(x @ p["1.weight"].T + p["1.bias"], approximate="tanh")
        x = torch.tanh(x @ p["3.weight"].T + p["3.bias"])
        return x @ p["0.weight"].T


def numpy_network(dtype: str) -> Any:
    """Embedding tied to the last layer, two hidden layers with GELU and tanh."""
    n = hpctrain.numpy
    generator = np.random.default_rng(1)

    def parameter(*shape: int) -> Any:
        return n.Parameter(generator.normal(size=shape, scale=0.5).astype(dtype))

    table = parameter(VOCAB, WIDTH)
    layers = [n.Embedding(table), n.Linear(parameter(3, 2 * WIDTH), parameter(3)), n.Gelu(),
              n.Linear(parameter(WIDTH, 3), parameter(WIDTH)), n.Tanh(), n.Linear(table)]
    return n.network(layers, n.cross_entropy)


def numpy_case(context: Any, optimizer: str, dtype: str, accumulation: int, clip_norm: float | None,
               zero: Any = None) -> None:
    """A NumPy network through the same Trainer equals its torch twin in one process."""
    ours, theirs = options_of(optimizer)
    generator = np.random.default_rng(2)
    batches = [(generator.integers(VOCAB, size=(7, 2)), generator.integers(VOCAB, size=7)) for _ in range(5)]
    network = numpy_network(dtype)
    twin = TorchTwin(network)

    def loss(module: Any, batch: Any) -> Any:
        x, y = map(torch.tensor, batch)
        return torch.nn.functional.cross_entropy(module(x), y, reduction="sum"), len(y)

    truth = reference(twin, loss, batches, theirs(twin.values), clip_norm)
    trace = train(context, network, batches, accumulation, optimizer=ours, clip_norm=clip_norm,
                  zero=zero or hpctrain.Zero(bucket_bytes=100))
    assert_same(trace, truth, 1e-10 if dtype == "float64" else 2e-5)
