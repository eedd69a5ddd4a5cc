"""A backward in two parts: the gradients of matrices and convolution kernels can be computed later than the rest.

    forward         y = x W^T + b             torch's node, to which W is a constant; a hook on it has x
    first part      dx = dy W, db = 1 dy      all of autograd's backward; the hook keeps x and dy, the graph goes
    second part     dW = dy^T x               products alone, in any order

What zero-bubble schedules ask for (Qi et al., arXiv 2401.10241, section 2): about half of a backward's arithmetic is
in the second part. Parameters used in another way (norms, biases, embeddings, a weight that is computed from others)
have their gradients in the first part, so the sum of both parts is right for any graph.

Where a hook cannot do it, a node of our own takes the place of torch's: in a checkpointed block, whose x is not to be
held, and in layers that call autograd themselves, for which a constant W would be wrong. It costs some 0.1 ms a matrix.

Owns the class that parameters have during a pass, and what is kept. Must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hpctrain.adapters.torch.later_nodes import Convolution, Product, kernel_gradient, product_gradient
from hpctrain.errors import UnsupportedError

__all__ = ["Later", "LaterGradients", "weight_gradients"]

_RECORD = "_hpctrain_later"


class Later(NamedTuple):
    """One use of the parameter `name`: its gradient is `function(*arguments)`."""

    name: str
    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


class LaterGradients:
    """Watches the uses of these (trained) parameters. All calls are local.

    `own_autograd`: what runs between calls autograd itself (a gradient within a forward), so no hook will do.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, own_autograd: bool = False) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.kept: list[Later] | None = None  # a list while the first part of a backward runs
        self._task: int | None = None  # autograd's number of that backward
        self._own_autograd = own_autograd
        self._matrices = tuple(parameter for parameter in parameters.values() if parameter.ndim > 1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it matrices and kernels have a class that sees their uses; closed ones keep theirs."""
        changed = [p for p in self._matrices if type(p) is torch.nn.Parameter]
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

    @property
    def hooks(self) -> bool:
        """Whether hooks will do: not for what saves its tensors in another way, as a checkpoint and its repetition."""
        return not (self._own_autograd or self.kept is not None or _saves_otherwise())

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

    def keep(self, *uses: tuple[str, Callable[..., torch.Tensor], tuple[Any, ...]]) -> bool:
        """Keeps them as `Later` if the second part is to compute them; not in a backward that runs within the first."""
        if self.kept is None or torch._C._current_graph_task_id() != self._task:
            return False
        self.kept.extend(Later(*use) for use in uses)
        return True


def _saves_otherwise() -> bool:
    """Whether somebody decides what autograd saves (`torch.autograd.graph.saved_tensors_hooks`)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


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
        """Hooks on to torch's node, or puts ours in its place, where the function has one."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            use = _USES.get(func) if torch.is_grad_enabled() else None
            call = None if use is None else use(*args, **kwargs)
            result = None if call is None else call()
            return func(*args, **kwargs) if result is None else result


class _Weight(NamedTuple):
    """A watched parameter in the place of a weight."""

    record: LaterGradients
    name: str


class _Hook:
    """Keeps the factors of one product when its backward comes."""

    __slots__ = ("function", "rest", "weight", "x")

    def __init__(self, weight: _Weight, function: Callable[..., torch.Tensor], x: torch.Tensor, rest: Any) -> None:
        self.weight, self.function, self.x, self.rest = weight, function, x, rest

    def __call__(self, gradients: Any) -> None:
        """As torch calls it, before the node: with the gradients of the node's outputs."""
        record, name = self.weight
        if not torch.is_grad_enabled() and record.keep(
                (name, self.function, (self.x.detach(), gradients[0], self.rest))):
            return
        raise UnsupportedError(f"own_autograd = False, but the layers run a backward of their own through {name!r}, "
                               "and the schedule has backwards in two parts; legal is stage(..., own_autograd=True)")


_Call = Callable[[], torch.Tensor | None]  # None: as torch does it


def _hooked(light: Callable[[], torch.Tensor], hook: _Hook, ours: _Call | None) -> torch.Tensor | None:
    """What `light` computes, with the hook on its node; where that is not found, what `ours` computes."""
    y = light()
    node: Any = y.grad_fn
    while node.name() in _VIEWS:  # not on these: what is written into the result would go past them
        node = node.next_functions[0][0]
    if node.name() not in _PRODUCTS:
        return None if ours is None else ours()
    node.register_prehook(hook)
    return y


_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0"})
_PRODUCTS = frozenset({"AddmmBackward0", "MmBackward0", "ConvolutionBackward0"})


def _weight(weight: Any, x: Any) -> _Weight | None:
    """None if its gradient is better left to torch."""
    record = weight.__dict__.get(_RECORD) if isinstance(weight, torch.nn.Parameter) else None
    if record is None or torch.is_autocast_enabled(x.device.type):
        return None
    return _Weight(record, record.names[id(weight)])


def _has_graph(x: Any, bias: Any) -> bool:
    """Whether there will be a node where the weight is a constant."""
    return bool(x.requires_grad or (bias is not None and bias.requires_grad))


def _bias(weight: _Weight, bias: Any) -> str | None:
    """The bias as our nodes take it: its name, or "" if it has no gradient. None: it is none that they take."""
    if bias is None or not bias.requires_grad:
        return ""
    return weight.record.names.get(id(bias)) if bias.ndim == 1 else None


def _product(x: Any, weight: Any, bias: Any, straight: bool, light: Callable[[], torch.Tensor]) -> _Call | None:
    """`light` computes the product with the weight as a constant."""
    use = _weight(weight, x)
    if use is None:
        return None
    return _call(use, x, bias, light, _Hook(use, product_gradient, x, straight),
                 lambda names: Product.apply(x, weight, bias, names, straight))


def _call(use: _Weight, x: Any, bias: Any, light: Callable[[], torch.Tensor], hook: _Hook,
          node: Callable[[Any], torch.Tensor]) -> _Call | None:
    """The way that will do: `light` with a hook, or `node` with the names of what it takes."""
    bias_name = _bias(use, bias)
    ours = None if bias_name is None else lambda: node((*use, bias_name))
    if use.record.hooks and _has_graph(x, bias):
        return lambda: _hooked(light, hook, ours)
    return ours


def _linear(input: Any, weight: Any, bias: Any = None) -> _Call | None:  # noqa: A002 - torch's name
    return _product(input, weight, bias, False, lambda: functional.linear(input, weight.detach(), bias))


def _addmm(bias: Any, x: Any = None, weight: Any = None, *others: Any, **options: Any) -> _Call | None:
    if others or options or x is None or bias.ndim != 1:
        return None
    return _product(x, weight, bias, True, lambda: torch.addmm(bias, x, weight.detach()))


def _matmul(x: Any, weight: Any = None, *others: Any, **options: Any) -> _Call | None:
    if others or options or getattr(weight, "ndim", 0) != 2 or x.ndim < 2:
        return None
    return _product(x, weight, None, True, lambda: torch.matmul(x, weight.detach()))


def _convolution(function: Callable[..., torch.Tensor]) -> Callable[..., _Call | None]:
    def use_of(input: Any, weight: Any, bias: Any = None, *options: Any, **more: Any) -> _Call | None:  # noqa: A002
        stride, padding, dilation, groups = (more.get(name, value) for name, value in _given(options))
        use = _weight(weight, input)
        if use is None or isinstance(padding, str) or input.ndim != weight.ndim:
            return None
        lists = [[value] * (weight.ndim - 2) if isinstance(value, int)
                 else list(value) * ((weight.ndim - 2) // len(value)) for value in (stride, padding, dilation)]
        settings = (*lists, groups)
        return _call(use, input, bias, lambda: function(input, weight.detach(), bias, *options, **more),
                     _Hook(use, kernel_gradient, input, (weight.shape, settings)),
                     lambda names: Convolution.apply(input, weight, bias, names, settings))

    return use_of


def _given(options: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Stride, padding, dilation and groups by name: those given without, else their defaults."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for number, (name, default) in enumerate(defaults.items()):
        yield name, options[number] if number < len(options) else default


_USES: dict[Any, Callable[..., _Call | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **{function: _convolution(function) for function in (functional.conv1d, functional.conv2d, functional.conv3d)},
}
