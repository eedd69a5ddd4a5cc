"""Where the memory of a module's parameters is: flat views, or memory that is lent while a unit is open.

    flat parameters |----p0----|--p1--|   p0.data is a view: the optimizer writes what the module reads
    closed          shape and type stay; the storage, to which autograd's graph may refer, has no bytes
    open            the same storage, with its bytes again

Owns the parameters' `data`. Must not know when a unit is open, or who fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hpctrain.adapters.torch.closed import Closed, close_parameter, closed_of, open_parameter
from hpctrain.adapters.torch.partition import gather_parameter
from hpctrain.errors import ConfigError

__all__ = ["Homes"]

_HOOK = "_hpctrain_hook"  # the attribute of a parameter that holds our hook's handle


class Homes:
    """The parameters of one module, by name. All calls are local, but for parameters that were made partitioned."""

    def __init__(self, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._trained = {name: p.requires_grad for name, p in parameters.items()}
        self._places = [(part, key, p) for part in module.modules() for key, p in part._parameters.items()
                        if p is not None]
        self._homes: dict[str, int] = {}  # the address of each parameter's memory, unless closed
        self._lent: dict[str, torch.Tensor] = {}

    def values(self, name: str) -> torch.Tensor:
        """The parameter's values. Collective over the group that it was partitioned over, if it was."""
        gather_parameter(self._parameters[name])
        return self._parameters[name].detach()

    def bind(self, name: str, array: torch.Tensor, accumulated: Callable[[torch.nn.Parameter], None]) -> None:
        """Moves the parameter into the flat array and, unless frozen, hooks its gradient."""
        held = self._parameters[name]
        gather_parameter(held)
        view = array.view(held.shape)
        view.copy_(held.detach())
        held.data = view
        held.grad = None
        self._homes[name] = view.data_ptr()
        earlier = held.__dict__.pop(_HOOK, None)  # of another trainer of this module, which `check` then refuses
        if earlier is not None:
            earlier.remove()
        if held.requires_grad:
            held.__dict__[_HOOK] = held.register_post_accumulate_grad_hook(accumulated)

    def move(self, name: str, array: torch.Tensor) -> None:
        """The parameter is the flat array, as it is.

        A graph may have saved the parameter itself, whose values are then those at the time of the backward, or a view
        of the memory that it had.
        """
        held = self._parameters[name]
        held.data = array.view(held.shape)
        self._homes[name] = held.data_ptr()

    def check(self) -> None:
        """Refuses to train parameters that are no longer what was bound: the optimizer would miss it."""
        for name, address in self._homes.items():
            parameter = self._parameters[name]
            parameter.grad = None  # what somebody else's backward left is not part of our sum
            if parameter.data_ptr() != address:
                raise ConfigError(f"parameter {name!r} has moved since the trainer was made (module.to(...), another "
                                  "trainer of the same module, or an assignment to .data): move first, then adapt once")
        for name, trained in self._trained.items():
            if self._parameters[name].requires_grad != trained:
                was, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise ConfigError(f"parameter {name!r} was {was} when the model was adapted and is {now} now "
                                  "(requires_grad); save, set requires_grad, adapt again, make a new trainer and "
                                  "resume: parameters that stay trained keep their optimizer states")
        for part, key, parameter in self._places:
            if part._parameters.get(key) is not parameter:
                raise ConfigError(f"parameter {key!r} of {type(part).__name__} was replaced by another object after "
                                  "the model was adapted: replace first, then adapt")

    def open(self, name: str) -> torch.Tensor:
        """Lends the parameter memory, values undefined; gives it as a flat array."""
        lent = self._lent[name]
        lent.untyped_storage().resize_(lent.numel() * lent.element_size())
        open_parameter(self._parameters[name])
        self._homes[name] = lent.data_ptr()
        return lent.view(-1)

    def close(self, name: str, record: Callable[[type], Closed]) -> None:
        """Takes the parameter's memory; touching it says so. Nothing happens where others have moved it since."""
        held = self._parameters[name]
        if closed_of(held) is not None or self._homes.pop(name, None) != held.data_ptr():
            return
        if name not in self._lent:
            self._lent[name] = torch.empty(held.shape, dtype=held.dtype)
            held.data = self._lent[name]
        self._lent[name].untyped_storage().resize_(0)
        close_parameter(held, record(type(held)))


