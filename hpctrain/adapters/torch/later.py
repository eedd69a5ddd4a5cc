"""A backward in two parts: the gradients of matrices and convolution kernels can be computed later than the rest.

    forward         y = x W^T + b             a node of our own in autograd's graph, in the place of torch's
    first part      dx = dy W                 all of autograd's backward; x and dy are kept, the graph is not
    second part     dW = dy^T x, db = 1 dy    products alone, in any order

What zero-bubble schedules ask for (Qi et al., arXiv 2401.10241, section 2): about half of a backward's arithmetic is
in the second part. Parameters used in another way (norms, embeddings, a weight that is computed from others) have
their gradients in the first part, so the sum of both parts is right for any graph. A backward that is not split
computes all at once.

Owns the class that parameters have during a pass, and the nodes. Must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional

__all__ = ["Later", "LaterGradients", "weight_gradients"]

_RECORD = "_hpctrain_later"


@dataclass(frozen=True)
class Later:
    """One use of the parameter `name`: its gradient is `function(*arguments)`."""

    name: str
    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


class LaterGradients:
    """Watches the uses of these (trained) parameters. All calls are local."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.kept: list[Later] | None = None  # a list while the first part of a backward runs
        self._task: int | None = None  # autograd's number of that backward
        self._parameters = tuple(parameters.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it matrices and kernels have a class that sees their uses; closed ones keep theirs."""
        changed = [p for p in self._parameters if p.ndim > 1 and type(p) is torch.nn.Parameter]
        for parameter in changed:
            parameter.__dict__[_RECORD] = self
            parameter.__class__ = _Watched
        try:
            yield
        finally:
            for parameter in changed:
                parameter.__dict__.pop(_RECORD, None)
                if type(parameter) is _Watched:
                    parameter.__class__ = torch.nn.Parameter

    @contextmanager
    def keeping(self, roots: Iterable[torch.Tensor]) -> Iterator[list[Later]]:
        """Within it runs the first part of the backward from `roots`, which fills the list."""
        assert self.kept is None, "one backward at a time"
        kept = self.kept = []
        self._task = None
        hooks = [root.register_hook(self._begins) for root in roots]
        try:
            with self.watching():  # a checkpoint's second forward must be like its first
                yield kept
        finally:
            self.kept = None
            for hook in hooks:
                hook.remove()

    def _begins(self, gradient: torch.Tensor) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    def keep(self, *uses: Later) -> bool:
        """Keeps them if it is for the second part to compute them; not in a backward that runs within the first."""
        if self.kept is None or torch._C._current_graph_task_id() != self._task:
            return False
        self.kept.extend(uses)
        return True


def weight_gradients(kept: list[Later], finished: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The second part: each parameter's whole gradient. Empties both arguments, so that memory falls as it goes.

    `finished` are gradients of the first part, by name: complete, or to be added to.
    """
    uses: dict[str, list[Later]] = {}
    for use in kept:
        uses.setdefault(use.name, []).append(use)
    kept.clear()
    for name in [name for name in finished if name not in uses]:
        yield name, finished.pop(name)
    for name in list(uses):
        total = finished.pop(name, None)
        for later in uses.pop(name):
            gradient = later.function(*later.arguments)
            total = gradient if total is None else total.add_(gradient)
        assert total is not None
        yield name, total


class _Watched(torch.nn.Parameter):
    """A parameter during a pass. Never made: a parameter becomes one in `LaterGradients.watching`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Puts our node in the place of torch's where the function has one."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            node = _NODES.get(func) if torch.is_grad_enabled() else None
            call = None if node is None else node(*args, **kwargs)
            return func(*args, **kwargs) if call is None else call()


_Call = Callable[[], torch.Tensor]


def _use(weight: Any, bias: Any, x: Any) -> tuple[LaterGradients, str, str] | None:
    """(record, name of the weight, name of the bias); None if the gradients are better left to torch."""
    record = weight.__dict__.get(_RECORD) if isinstance(weight, torch.nn.Parameter) else None
    if record is None or torch.is_autocast_enabled(x.device.type):
        return None
    if bias is None or not bias.requires_grad:
        return record, record.names[id(weight)], ""
    bias_name = record.names.get(id(bias))
    return None if bias_name is None or bias.ndim != 1 else (record, record.names[id(weight)], bias_name)


def _linear(input: Any, weight: Any, bias: Any = None) -> _Call | None:  # noqa: A002 - torch's name
    use = _use(weight, bias, input)
    return None if use is None else lambda: _Product.apply(input, weight, bias, use, False)


def _addmm(bias: Any, x: Any = None, weight: Any = None, *others: Any, **options: Any) -> _Call | None:
    use = None if others or options or x is None else _use(weight, bias, x)
    if use is None or bias.ndim != 1:
        return None
    return lambda: _Product.apply(x, weight, bias, use, True)


def _matmul(x: Any, weight: Any = None, *others: Any, **options: Any) -> _Call | None:
    use = None if others or options else _use(weight, None, x)
    if use is None or weight.ndim != 2 or x.ndim < 2:
        return None
    return lambda: _Product.apply(x, weight, None, use, True)


class _Product(torch.autograd.Function):
    """x W^T + b (`straight` False), or x W + b. x is (..., inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, use: Any, straight: bool) -> Any:
        """The product; keeps x and W."""
        ctx.save_for_backward(x, weight)
        ctx.use, ctx.straight = use, straight
        flat, matrix = x.reshape(prod(x.shape[:-1]), x.shape[-1]), weight if straight else weight.T
        y = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])  # no view, so it may be written to

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """dx; dW and db now or later."""
        x, weight = ctx.saved_tensors
        record, weight_name, bias_name = ctx.use
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dy @ (weight.T if ctx.straight else weight) if needs_x else None
        uses = [Later(weight_name, _product_weight, (x.detach(), dy, ctx.straight))]
        if needs_bias:
            uses.append(Later(bias_name, _product_bias, (dy,)))
        if record.keep(*uses):
            return dx, None, None, None, None
        return (dx, _product_weight(x, dy, ctx.straight) if needs_weight else None,
                _product_bias(dy) if needs_bias else None, None, None)


def _product_weight(x: torch.Tensor, dy: torch.Tensor, straight: bool) -> torch.Tensor:
    rows = prod(x.shape[:-1])
    x, dy = x.reshape(rows, x.shape[-1]), dy.reshape(rows, dy.shape[-1])
    return x.T @ dy if straight else dy.T @ x


def _product_bias(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum(tuple(range(dy.ndim - 1))) if dy.ndim > 1 else dy.clone()


def _convolution(input: Any, weight: Any, bias: Any = None, *options: Any, **more: Any) -> _Call | None:  # noqa: A002
    stride, padding, dilation, groups = (more.get(name, value) for name, value in _given(options))
    use = _use(weight, bias, input)
    if use is None or isinstance(padding, str) or input.ndim != weight.ndim:
        return None
    lists = [[value] * (weight.ndim - 2) if isinstance(value, int) else list(value) * ((weight.ndim - 2) // len(value))
             for value in (stride, padding, dilation)]
    return lambda: _Convolution.apply(input, weight, bias, use, (*lists, groups))


def _given(options: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Stride, padding, dilation and groups by name: those given without, else their defaults."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for number, (name, default) in enumerate(defaults.items()):
        yield name, options[number] if number < len(options) else default


class _Convolution(torch.autograd.Function):
    """A convolution of one, two or three dims, with its options (stride, padding, dilation, groups)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, use: Any, options: Any) -> Any:
        """The convolution; keeps x and the kernel."""
        ctx.save_for_backward(x, weight)
        ctx.use, ctx.options = use, options
        stride, padding, dilation, groups = options
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """dx; the kernel's and the bias' gradients now or later."""
        x, weight = ctx.saved_tensors
        record, weight_name, bias_name = ctx.use
        needs = ctx.needs_input_grad[:3]
        uses = [Later(weight_name, _kernel, (x.detach(), weight.detach(), dy, ctx.options))]
        if needs[2]:
            uses.append(Later(bias_name, _convolution_bias, (dy,)))
        if record.keep(*uses):
            needs = (needs[0], False, False)
        return (*_convolution_part(x, weight, dy, ctx.options, needs), None, None)


def _convolution_part(x: Any, weight: Any, dy: Any, options: Any, needs: Any) -> Any:
    """(dx, gradient of the kernel, of the bias), None where not needed."""
    if not any(needs):
        return None, None, None
    stride, padding, dilation, groups = options
    return torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], stride, padding, dilation, False,
                                               [0] * len(stride), groups, list(needs))


def _kernel(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, options: Any) -> torch.Tensor:
    gradient: torch.Tensor = _convolution_part(x, weight, dy, options, (False, True, False))[1]
    return gradient


def _convolution_bias(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum((0, *range(2, dy.ndim)))


_NODES: dict[Any, Callable[..., _Call | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((functional.conv1d, functional.conv2d, functional.conv3d), _convolution),
}
