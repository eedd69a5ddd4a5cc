"""Whether the pieces of a model compute what the model does, on one example: outputs, gradients, changed buffers.

    in training      model(example), backward      pieces one after the other, backward       both the same
    in evaluation    model(example)                pieces one after the other                 both the same

What a tracer cannot see shows here: an autograd.Function whose backward is not the derivative of its forward, hooks of
gradients, reentrant checkpoints, writes into a tensor that a view in another piece should see. Gradients are compared
by two numbers each and let go of, so that no second copy of the parameters is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.adapters.torch.profile import undone

__all__ = ["Seen", "compare", "in_evaluation", "observe"]

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # of gradients; 5e-2 for half types
_PART = 2**20  # elements


@dataclass(frozen=True)
class Seen:
    """One pass: outputs, [norm, sum with changing signs] of each gradient, names of the buffers that it changed."""

    outputs: Any
    gradients: Mapping[str, torch.Tensor]
    changed: Sequence[str]


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Within it all of the model is in evaluation."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def observe(model: torch.nn.Module, run: Callable[[], Any], flat: Callable[[Any], Sequence[Any]], *,
            backward: bool) -> Seen:
    """Runs once. Parameters, their gradients, buffers and random numbers stay as they are. Local.

    Args:
        model: whose parameters `run` reads.
        run: gives the outputs.
        flat: makes a flat list of these.
        backward: whether gradients are computed, too.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in trained.items()}
    found: dict[str, torch.Tensor] = {}

    def take(name: str) -> Callable[[torch.Tensor], None]:
        def taken(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            found[name], parameter.grad = _summary(parameter.grad.to_dense()), None
        return taken

    hooks = [p.register_post_accumulate_grad_hook(take(name)) for name, p in trained.items()]
    try:
        with undone(model), torch.set_grad_enabled(backward):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for parameter in trained.values():
                parameter.grad = None
            outputs = run()
            changed = [name for name, b in model.named_buffers() if not torch.equal(b, before[name])]
            roots = [_with_signs(value) for value in flat(outputs)
                     if isinstance(value, torch.Tensor) and value.requires_grad]
            if roots:
                torch.autograd.backward(roots)
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
    return Seen(outputs, found, changed)


def _with_signs(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """A sum in which the order of the values shows."""
    weights = torch.cos(torch.arange(start, start + values.numel(), dtype=torch.float64)).to(values.dtype)
    return (values.abs() if values.is_complex() else values).flatten().dot(weights)


def _summary(gradient: torch.Tensor) -> torch.Tensor:
    """In float64; a part at a time, as the gradient may be large."""
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten()
    squares, signed = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for start in range(0, flat.numel(), _PART):
        part = flat[start: start + _PART].double()
        squares, signed = squares + part.dot(part), signed + _with_signs(part, start)
    return torch.stack([squares.sqrt(), signed])


def compare(found: Seen, flat: Sequence[Any], truth: Seen, flat_truth: Sequence[Any], dtype: torch.dtype) -> str:
    """What differs, in words; "" if nothing does. `flat` are the outputs as lists; `dtype` is the parameters'."""
    try:
        for mine, theirs in zip(flat, flat_truth, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs, equal_nan=True, check_stride=False)
            elif mine != theirs:
                return f"an output is {mine!r} and not {theirs!r}"
    except AssertionError as error:
        return " ".join(str(error).split())
    if sorted(found.changed) != sorted(truth.changed):
        return f"buffers that change are {sorted(found.changed)} and not {sorted(truth.changed)}"
    largest = max((float(summary[0]) for summary in truth.gradients.values()), default=0.0)
    for name in sorted({*found.gradients, *truth.gradients}):
        mine, theirs = (seen.gradients.get(name, torch.zeros(2).double()) for seen in (found, truth))
        bound = _ROUNDING.get(dtype, 5e-2) * max(float(theirs[0]), 1e-3 * largest)
        if not bool(((mine - theirs).abs() <= bound).all()) and bool(theirs.isfinite().all()):
            return f"the gradient of parameter {name!r} differs"
    return ""
