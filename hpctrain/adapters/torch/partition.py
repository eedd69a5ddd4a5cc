"""Parameters that are partitioned over ranks as soon as they are made, so that no rank ever holds a whole model.

    lin = Linear(...)      lin's parameters are whole
    other = Linear(...)    as other registers its first one, each rank keeps its part of lin's, and drops the rest
    lin.weight.zero_()     touched: gathered, changed on all ranks alike; its part is kept again at the next event

Every rank runs the same constructors on the same random numbers, so it keeps its part of its own values, with no
message; only to touch a partitioned parameter is collective. Owns the parts. Knows no group: `gather` is given.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from hpctrain.adapters.torch.closed import Closed, close_parameter, closed_of, open_parameter, shell_of, tensors_in
from hpctrain.plan.split import bounds

__all__ = ["Collectives", "Partitioner", "gather_parameter", "gathered_parts", "partitioned_parameters"]

_PART = "_hpctrain_part"
_WHY = ("it was made within hpctrain.torch.partitioned(...), and each rank keeps a part of it until a trainer is made; "
        "within hpctrain.torch.gathered(module) it is whole")


@dataclass(frozen=True)
class Collectives:
    """What parts travel by; collective over the ranks that parameters are partitioned over.

    `gather(own part, elements a rank, target)` puts all parts into target, in rank order; `broadcast(values, root)`.
    """

    rank: int
    size: int
    gather: Callable[[torch.Tensor, Sequence[int], torch.Tensor], None]
    broadcast: Callable[[torch.Tensor, int], None]


@dataclass(frozen=True)
class _Part:
    """What this rank keeps of one parameter, and how the rest is got."""

    own: torch.Tensor
    counts: list[int]
    owner: Partitioner


@dataclass(eq=False)
class _Whole:
    """A parameter that is whole at the moment. `users` keep it so: views of it, and the call that works on it."""

    parameter: torch.nn.Parameter
    maker: torch.nn.Module | None
    users: list[weakref.ref[Any]] = field(default_factory=list)


class _Partitioned(Closed):
    """The record of a partitioned parameter."""

    def __init__(self, name: str, home: type, owner: Partitioner) -> None:
        super().__init__(name, _WHY, home)
        self._owner = owner

    def fetch(self, closed: Sequence[torch.nn.Parameter],
              tensors: Sequence[torch.Tensor]) -> Callable[[Any], None] | None:
        return self._owner.touched(closed, tensors)

    def copied(self, parameter: torch.nn.Parameter, copy: torch.nn.Parameter) -> Closed:
        part = parameter.__dict__[_PART]
        copy.__dict__[_PART] = _Part(part.own.clone(), part.counts, part.owner)
        return _Partitioned(self.name, self.home, self._owner)


class Partitioner:
    """Partitions what is made within `constructing`. Every rank runs the same code there."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._whole: list[_Whole] = []
        self._thread: int | None = None  # while within `constructing`

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Within it, parameters are partitioned soon after they are made. Collective."""
        self._thread = threading.get_ident()
        hooks = [register_module_parameter_registration_hook(self._registers_parameter),
                 register_module_module_registration_hook(self._registers_module)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._thread = None
        for whole in self._whole:
            self.release(whole.parameter, self._name(whole))
        self._whole.clear()

    def _registers_parameter(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        if self._thread != threading.get_ident() or parameter is None or is_lazy(parameter):
            return
        if not isinstance(module, ParametrizationList):  # it makes its parameters of another module's
            self._release_done(except_of=module)
        if closed_of(parameter) is None and all(whole.parameter is not parameter for whole in self._whole):
            self._whole.append(_Whole(parameter, module))

    def _registers_module(self, module: torch.nn.Module, name: str, child: Any) -> None:
        if self._thread != threading.get_ident() or child is None:
            return
        known = {id(whole.parameter) for whole in self._whole}
        for parameter in child.parameters():  # a deep copy of a module registers nothing
            if closed_of(parameter) is None and id(parameter) not in known and not is_lazy(parameter):
                self._whole.append(_Whole(parameter, child))
        self._release_done(except_of=module)

    def touched(self, closed: Sequence[torch.nn.Parameter],
                tensors: Sequence[torch.Tensor]) -> Callable[[Any], None] | None:
        """Gathers parameters that a constructor works on; None: it is none that does."""
        if self._thread != threading.get_ident():
            return None

        def heard(result: Any) -> None:
            for tensor in tensors_in(result):
                for whole in self._whole:
                    if tensor is not whole.parameter and _shares(tensor, whole.parameter):
                        whole.users.append(weakref.ref(tensor))

        for whole in self._whole:
            if any(tensor is whole.parameter for tensor in tensors):
                whole.users.append(weakref.ref(heard))
        self._release_done(except_of=None)
        for parameter in closed:
            if gather_parameter(parameter):
                self._whole.append(_Whole(parameter, None, [weakref.ref(heard)]))
        return heard

    def _release_done(self, except_of: torch.nn.Module | None) -> None:
        keep = []
        for whole in self._whole:
            if (except_of is not None and whole.maker is except_of) or any(user() is not None for user in whole.users):
                keep.append(whole)
            else:
                self.release(whole.parameter, self._name(whole))
        self._whole = keep

    @staticmethod
    def _name(whole: _Whole) -> str:
        """What it is called as long as the model's name for it is not known."""
        if whole.maker is None:
            return "?"
        key = next((key for key, p in whole.maker._parameters.items() if p is whole.parameter), "?")
        return f"{type(whole.maker).__name__}.{key}"

    def release(self, parameter: torch.nn.Parameter, name: str) -> None:
        """Keeps this rank's part of a parameter that is whole. Local."""
        if closed_of(parameter) is not None:
            return
        cuts = bounds(parameter.numel(), self.collectives.size)
        start, stop = cuts[self.collectives.rank], cuts[self.collectives.rank + 1]
        own = parameter.detach().reshape(-1)[start:stop].clone()
        parameter.data = shell_of(parameter)
        parameter.__dict__[_PART] = _Part(own, [b - a for a, b in pairwise(cuts)], self)
        close_parameter(parameter, _Partitioned(name, type(parameter), self))


def _shares(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    if closed_of(parameter) is not None or tensor.layout != torch.strided:
        return False
    return bool(tensor.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def gather_parameter(parameter: torch.nn.Parameter) -> bool:
    """Makes a partitioned parameter whole; tells whether it was one. Collective over the ranks that have its parts."""
    part = parameter.__dict__.pop(_PART, None)
    if part is None:
        return False
    shape, whole = tuple(parameter.shape), torch.empty(sum(part.counts), dtype=part.own.dtype)
    part.owner.collectives.gather(part.own, part.counts, whole)
    open_parameter(parameter)
    parameter.data = whole.view(shape)
    return True


def partitioned_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module that are partitioned, by name."""
    return {name: p for name, p in module.named_parameters() if _PART in p.__dict__}


@contextmanager
def gathered_parts(parameters: dict[str, torch.nn.Parameter], modify: int | None) -> Iterator[None]:
    """Within it these partitioned parameters are whole; changes on rank `modify` are kept. Collective."""
    parts = {name: p.__dict__[_PART] for name, p in parameters.items()}
    for parameter in parameters.values():
        gather_parameter(parameter)
    kept = False
    try:
        yield
        kept = modify is not None
    finally:
        for name, parameter in parameters.items():
            owner = parts[name].owner
            if kept:
                owner.collectives.broadcast(parameter.detach(), modify)
            owner.release(parameter, name)
            if not kept:
                parameter.__dict__[_PART] = parts[name]
