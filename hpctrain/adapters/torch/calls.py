"""When the parameters of a unit are read: in each call of a module, and again in the backward of that call.

    forward    before(u) | forward of the module | after(u)
    backward   gradient of an output comes: before(u) | its graph, backwards | after(u): gradient of an input comes

autograd runs what was recorded later first. So once the gradient of some input of a call goes further down, to what
was recorded before the call, all that the call recorded is done. Where no input has a graph, the end of this backward
counts.

Owns hooks and the calls under way. Must not know where parameters come from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hpctrain.adapters.torch.closed import tensors_in

__all__ = ["Calls"]


class _Call:
    """One call of one module, as its backward sees it."""

    def __init__(self, calls: Calls, units: tuple[int, ...], inputs: Sequence[torch.Tensor]) -> None:
        self._calls, self.units = calls, units
        self._has_end = bool(inputs)
        self._is_open = False
        for tensor in inputs:
            _hook_first(tensor, self._leaves)

    def reaches(self, outputs: Sequence[torch.Tensor]) -> None:
        """The module gave these: their gradients start the call's backward."""
        for tensor in outputs:
            tensor.register_hook(self._enters)

    def _enters(self, gradient: torch.Tensor) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._calls.enter(self)
        if not self._has_end:
            # Of this run of the engine: the backward of a checkpoint that is run within a backward ends earlier.
            torch.autograd.Variable._execution_engine.queue_callback(self.ends)

    def _leaves(self, gradient: torch.Tensor) -> None:
        self.ends()

    def ends(self) -> None:
        """Nothing of the call is left to do in this backward."""
        if self._is_open:
            self._is_open = False
            self._calls.leave(self)


def _hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Hooks the gradient of an input of a call, to be run before the hooks of the call that it is an output of.

    So the one unit gives up its memory before the other takes some.
    """
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    earlier = [(key, value) for key, value in hooks.items() if key != handle.id]
    for key, value in earlier:
        del hooks[key]
        hooks[key] = value


def _left_in(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors with a graph that a call left as attributes (the loss of a router, say): outputs by another way."""
    for part in module.modules():
        for value in part.__dict__.values():
            if isinstance(value, (torch.Tensor, list, tuple)):
                yield from (t for t in tensors_in(value) if not t.is_leaf)


class _Begun(NamedTuple):
    """A call of a module that is under way."""

    module: torch.nn.Module
    units: tuple[int, ...]
    call: _Call | None  # None: there will be no backward


class Calls:
    """Tells `before` and `after` of the units that the calls of modules read. All calls are local."""

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self._before, self._after = before, after
        self._forward: list[_Begun] = []
        self._backward: list[_Call] = []

    def watch(self, module: torch.nn.Module, units: tuple[int, ...]) -> None:
        """From now on the calls of `module` are told of."""
        if not units:
            return
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, _Hook):
                hook.forget()

        def entered(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(part, units, (args, kwargs))

        def left(part: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            self._end(part, units, outputs)

        # Before hooks that compute weights (weight_norm), and also after an error: the last part of a checkpoint's
        # second forward ends in one.
        module.register_forward_pre_hook(_Hook(module, entered), with_kwargs=True, prepend=True)
        module.register_forward_hook(_Hook(module, left), with_kwargs=True, always_call=True)

    def _begin(self, module: torch.nn.Module, units: tuple[int, ...], inputs: Any) -> None:
        """A call of a module begins."""
        self._open(units)
        call = None
        if torch.is_grad_enabled():
            call = _Call(self, units, [t for t in tensors_in(inputs) if t.requires_grad and not t.is_leaf])
        self._forward.append(_Begun(module, units, call))

    def _end(self, module: torch.nn.Module, units: tuple[int, ...], outputs: Any) -> None:
        """The call of the module is over, by an error if there are no outputs."""
        if not self._forward or self._forward[-1].module is not module:
            return  # its beginning failed
        call = self._forward.pop().call
        if call is not None:
            call.reaches([t for t in (*tensors_in(outputs), *_left_in(module)) if t.requires_grad])
        self._close(units)

    def enter(self, call: _Call) -> None:
        """The backward of a call begins."""
        self._open(call.units)
        self._backward.append(call)

    def leave(self, call: _Call) -> None:
        """The backward of a call is over."""
        self._backward.remove(call)
        self._close(call.units)

    def forward_ends(self) -> None:
        """The whole forward is over: calls that a KeyboardInterrupt ended are over too."""
        while self._forward:
            self._close(self._forward.pop().units)

    def backward_ends(self) -> None:
        """The whole backward is over: what no input told of ends now."""
        for call in tuple(reversed(self._backward)):
            call.ends()

    def _open(self, units: tuple[int, ...]) -> None:
        for number, unit in enumerate(units):
            try:
                self._before(unit)
            except BaseException:
                self._close(units[:number])
                raise

    def _close(self, units: tuple[int, ...]) -> None:
        for unit in reversed(units):
            self._after(unit)


class _Hook:
    """One hook of one module. On a copy of the module, and after a copy of itself, it does nothing."""

    def __init__(self, module: torch.nn.Module | None = None, told: Callable[..., None] | None = None) -> None:
        self._module, self._told = None if module is None else weakref.ref(module), told

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        """What torch calls."""
        if self._told is not None and self._module is not None and module is self._module():
            self._told(module, *arguments)

    def forget(self) -> None:
        """Another model watches the module now."""
        self._told = None

    def __reduce__(self) -> Any:
        """A copied or loaded module has a hook that does nothing."""
        return _Hook, ()
