"""Any `torch.nn.Module` as a Model.

Joins the module's hooks (`calls`), the memory of its parameters (`homes`) and its units. Must not know who reduces
gradients or gathers parameters. A gradient is None but for the moment in which it is delivered: so autograd hands its
tensor over, uncopied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from hpctrain.adapters.torch.calls import Calls
from hpctrain.adapters.torch.closed import Closed, closed_of
from hpctrain.adapters.torch.homes import Homes
from hpctrain.adapters.torch.units import find_units
from hpctrain.contracts import Arrays, Replicated
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.placement import Placement

__all__ = ["Loss", "TorchModel"]

_SPREAD = ("it is spread over the ranks (zero.stage = 3, zero.share = 'none') and whole only in calls of the module "
           "that owns it. To read it elsewhere: `with hpctrain.torch.gathered(trainer):`. If the forward of a module "
           "above it reads it: `hpctrain.torch.adapt(..., units=[name of that module])`")

#: `loss(module, micro_batch) -> (loss_sum, weight)`: a tensor of one element, and how much it weighs (tokens, samples).
Loss = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, float]]


class TorchModel:
    """A module and its loss. Made on every rank with the same module; lives in one process; all calls are local.

    `no_decay` are glob patterns of parameters that weight decay is not meant for; `units` those of modules that use
    parameters together (see `units`). Parameters with `requires_grad=False` when this is made are frozen: saved, but
    neither reduced nor updated. `ties` has all names that a parameter has in a larger model, of which this is a part;
    the first one is what it goes by.
    """

    splits = False
    replicated: Replicated = False  # a stage of tensor-parallel layers is told otherwise

    def __init__(self, module: torch.nn.Module, loss: Loss, arrays: Arrays, no_decay: Sequence[str] = (),
                 units: Sequence[str] = (), ties: Mapping[str, Sequence[str]] | None = None) -> None:
        self.module = module
        self.arrays = arrays
        self._loss = loss
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        if ties is not None:
            names = {parameter: list(ties.get(own[0], own)) for parameter, own in names.items()}
        self._parameters = {first: parameter for parameter, (first, *_) in names.items()}
        for name, parameter in self._parameters.items():
            _check_kind(name, parameter)
        self.placements = tuple(
            Placement(name, tuple(parameter.shape), arrays.dtype(parameter), aliases=tuple(names[parameter][1:]),
                      decay=not any(fnmatchcase(name, p) for p in no_decay), frozen=not parameter.requires_grad)
            for name, parameter in self._parameters.items()
        )
        self._homes = Homes(module, self._parameters)
        self.units, self._users = find_units(module, {p: name for name, p in self._parameters.items()}, units)
        self._deliver: Callable[[str, Any], None] | None = None  # while a backward of ours runs
        self._calls: Calls | None = None

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter's values. Collective where it was made within `partitioned`."""
        return self._homes.values(name)

    def bind(self, name: str, parameter: torch.Tensor) -> None:
        """Moves the parameter into the flat view and, unless frozen, hooks its gradient."""
        self._homes.bind(name, parameter, partial(self._accumulated, name))

    def move(self, name: str, parameter: torch.Tensor) -> None:
        """The parameter is the flat view."""
        self._homes.move(name, parameter)

    def check(self) -> None:
        """Refuses parameters that were moved, replaced, frozen or thawed since this was made."""
        self._homes.check()

    def _accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Runs when autograd has the gradient of this backward."""
        if self._deliver is None or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad, None
        self._deliver(name, gradient if gradient.layout is torch.strided else gradient.to_dense())

    def watch(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """Hooks the modules that use parameters."""
        self._calls = Calls(before, after)
        for user in self._users:
            self._calls.watch(user.module, user.units)

    def open(self, unit: int) -> list[torch.Tensor]:
        """Gives the unit's parameters memory."""
        return [self._homes.open(name) for name in self.units[unit]]

    def close(self, unit: int) -> None:
        """Takes the memory of the unit's parameters."""
        for name in self.units[unit]:
            self._homes.close(name, partial(Closed, name, _SPREAD))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's persistent buffers (running statistics), as the state dict names them."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: b for name, b in self.module.named_buffers() if name in saved}

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Computes the loss of a micro-batch; the stash is the loss tensor with its graph (None in evaluation)."""
        try:
            if training:
                self.check()
                loss_sum, weight = self._checked(self._loss(self.module, micro_batch))
                return (float(loss_sum.detach()), float(weight)), loss_sum
            return self._evaluated(micro_batch), None
        finally:
            if self._calls is not None:
                self._calls.forward_ends()

    def _evaluated(self, micro_batch: Any) -> tuple[float, float]:
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                loss_sum, weight = self._checked(self._loss(self.module, micro_batch))
        finally:
            self.module.train(was_training)
        return float(loss_sum), float(weight)

    @staticmethod
    def _checked(result: Any) -> tuple[torch.Tensor, float]:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
            raise ConfigError(f"loss returned {type(result).__name__}; legal is a pair (loss_sum, weight): the summed "
                              "loss terms as a tensor, and how many terms (tokens, samples) they are")
        if result[0].numel() != 1:
            raise ConfigError(f"loss_sum has shape {tuple(result[0].shape)}; legal is one element: the sum of terms")
        return result

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, torch.Tensor], None],
                 scale: float = 1.0) -> None:
        """Runs autograd from scale * the stash's loss, delivering each parameter's gradient as it completes."""
        self._deliver = deliver
        try:
            if stash.requires_grad:
                stash.backward(None if scale == 1.0 else torch.full_like(stash, scale))
        finally:
            self._deliver = None
            if self._calls is not None:
                self._calls.backward_ends()

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        """All of the backward: a model in one piece has nobody who waits for the gradient of its inputs."""
        gradients: dict[str, torch.Tensor] = {}
        self.backward(stash, output_grads, gradients.__setitem__, scale)
        return None, gradients

    def backward_weight(self, rest: Any, deliver: Callable[[str, torch.Tensor], None]) -> None:
        """Delivers what `backward_input` computed."""
        while rest:
            deliver(*rest.popitem())

    def rank_state(self) -> dict[str, bytes]:
        """The state of torch's default generator (dropout draws from it)."""
        return {"torch_rng": torch.get_rng_state().numpy().tobytes()}

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Takes back what `rank_state` gave."""
        if "torch_rng" in state:
            torch.set_rng_state(torch.frombuffer(bytearray(state["torch_rng"]), dtype=torch.uint8))


def _check_kind(name: str, parameter: torch.nn.Parameter) -> None:
    """Refuses what cannot live in a flat buffer, and what another trainer spread."""
    if parameter.device.type != "cpu" or parameter.layout != torch.strided:
        raise UnsupportedError(f"parameter {name!r} is {parameter.layout} on device {str(parameter.device)!r}; "
                               "legal are dense (torch.strided) parameters on 'cpu'")
    record = closed_of(parameter)
    if record is None:
        return
    if record.why == _SPREAD:
        raise ConfigError(f"parameter {name!r} is spread over the ranks by another trainer; adapt the module again "
                          "within hpctrain.torch.gathered(...) of that trainer, or build it anew")
    record.name = name
