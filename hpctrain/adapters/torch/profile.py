"""What each layer of a torch model costs, measured: for the partitioner.

Owns the timing. Must not know stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from hpctrain.adapters.torch.cut import stage_layers, tree
from hpctrain.adapters.torch.layers import Chain
from hpctrain.adapters.torch.nests import map_tensors, pairs
from hpctrain.adapters.torch.stage import Ends
from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.partition import Layer

__all__ = ["profile", "undone"]


def profile(whole: Chain, micro_batch: Any, ends: Ends, repeats: int = 5) -> list[Layer]:
    """One record a layer, for one micro-batch; medians of `repeats` runs after one more. Local."""
    if repeats < 1:
        raise ConfigError(f"repeats = {repeats}; legal are 1 and more")
    layers = stage_layers(whole, (0, len(whole.layers)), 0)
    found: list[Layer] = []
    with undone(tree(layers)):
        value = ends.inputs(micro_batch)
        for number, layer in enumerate(layers):
            def run(leaves: Any, layer: Any = layer, is_last: bool = number == len(layers) - 1) -> Any:
                given = layer.run(*layer.parts.values(), leaves)
                return ends.loss(given, micro_batch)[0] if is_last else given

            trained = [p for p in tree([layer]).parameters() if p.requires_grad]
            forward, backward, outputs = _measured(run, value, trained, repeats)
            found.append(Layer(forward, backward, sum(t.nbytes for t, _ in pairs(outputs, None)),
                               sum(p.nbytes for p in tree([layer]).parameters())))
            value = outputs
    return found


def _measured(run: Callable[[Any], Any], value: Any, trained: list[torch.nn.Parameter],
              repeats: int) -> tuple[float, float, Any]:
    """(seconds forward, seconds backward, outputs that know whether they need a gradient)."""
    forward, backward = [], []
    for _ in range(repeats + 1):
        leaves = map_tensors(_copy, value)
        wanted = [*trained, *(t for t, _ in pairs(leaves, None) if t.requires_grad)]
        start = time.perf_counter()
        outputs = run(leaves)
        forward.append(time.perf_counter() - start)
        roots = [t for t, _ in pairs(outputs, None) if t.requires_grad]
        kept = map_tensors(_copy, outputs)
        grads = [torch.ones_like(t) for t in roots]
        start = time.perf_counter()
        if roots and wanted:
            torch.autograd.grad(roots, wanted, grads, allow_unused=True)
        backward.append(time.perf_counter() - start if roots else 0.0)
    return median(forward[1:]), median(backward[1:]), kept


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """As another stage would have it; it needs a gradient where the original does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def undone(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards buffers and random numbers are what they were."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)
