"""Stages run one after the other by hand, as a pipeline would, and what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.adapters.torch.stage import TorchStage


def whole(module: torch.nn.Module, loss: Callable[[Any, Any], Any], batches: Sequence[Any],
          scale: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: the loss of each micro-batch, and the sum of all gradients by name. `loss(outputs, micro_batch)`."""
    module = copy.deepcopy(module)
    losses = []
    for batch in batches:
        loss_sum = loss(module(batch[0]), batch)[0]
        losses.append(float(loss_sum.detach()))
        if loss_sum.requires_grad:
            (loss_sum * scale).backward()
    return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def bind(stages: Sequence[TorchStage]) -> None:
    """Gives each stage memory for its parameters, as a trainer does."""
    for stage in stages:
        for placement in stage.placements:
            dtype = getattr(torch, placement.dtype)
            stage.bind(placement.name, torch.empty(placement.count, dtype=dtype))


def sent(nest: Any) -> Any:
    """What arrives at another rank."""
    if isinstance(nest, torch.Tensor):
        assert nest.is_contiguous() and not nest.requires_grad
        return nest.clone()
    if isinstance(nest, dict):
        return {key: sent(value) for key, value in nest.items()}
    return type(nest)(map(sent, nest)) if isinstance(nest, list | tuple) else nest


def by_hand(stages: Sequence[TorchStage], batches: Sequence[Any], *, split: bool,
            splits: bool | None = None, scale: float = 1.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As `whole`: all forwards, then all backwards, in one part each, or in two with the second parts at the end.

    `splits` is what the stages are told, if not the truth.
    """
    gradients: dict[str, torch.Tensor] = {}

    def deliver(name: str, gradient: torch.Tensor) -> None:
        gradients[name] = gradients[name] + gradient if name in gradients else gradient.clone()
        gradient.fill_(float("nan"))  # the callee may write

    stashes: list[list[Any]] = []
    losses, rests = [], []
    for batch in batches:
        value: Any = None
        stashes.append([])
        for stage in stages:
            stage.splits = split if splits is None else splits
            value, stash = stage.forward(batch, sent(value))
            stashes[-1].append(stash)
        losses.append(value[0])
    for of_batch in stashes:
        grads: Any = None
        for stage in reversed(stages):
            if split:
                grads, rest = stage.backward_input(of_batch.pop(), sent(grads), scale)
                rests.append((stage, rest))
            else:
                grads = stage.backward(of_batch.pop(), sent(grads), deliver, scale)
            if stage.is_first:
                assert grads is None
    for stage, rest in rests:
        stage.backward_weight(rest, deliver)
    return losses, gradients


def assert_equal(found: Any, truth: Any, tolerance: float = 1e-12) -> None:
    """Losses and gradients are the same, and of the same parameters; None and zeros are the same."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(truth[0]), rtol=tolerance, atol=tolerance)
    for name in {*found[1], *truth[1]}:
        if name not in truth[1]:
            assert not found[1][name].any(), name
            continue
        assert name in found[1], name
        scale = max(1.0, float(truth[1][name].abs().max())) if truth[1][name].numel() else 1.0
        torch.testing.assert_close(found[1][name], truth[1][name], rtol=tolerance, atol=tolerance * scale, msg=name)
