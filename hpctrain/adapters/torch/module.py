"""Any `torch.nn.Module` as a Model.

Owns the module's hooks and the views that tie its parameters to flat buffers. Must not know who reduces gradients.

    flat parameters |----p0----|--p1--|        p0.data is a view: the optimizer writes what the module reads
    p0.grad         is None but for the moment in which it is delivered: so autograd hands its tensor over, uncopied
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from hpctrain.contracts import Arrays
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.placement import Placement

__all__ = ["Loss", "TorchModel"]

_HOOK = "_hpctrain_hook"  # the attribute of a parameter that holds our hook's handle

#: `loss(module, micro_batch) -> (loss_sum, weight)`: a tensor of one element, and how much it weighs (tokens, samples).
Loss = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, float]]


class TorchModel:
    """A module and its loss. Made on every rank with the same module; lives in one process; all calls are local.

    `no_decay` are glob patterns of parameters that weight decay is not meant for. Parameters with
    `requires_grad=False` when this is made are frozen: saved, but neither reduced nor updated.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss, arrays: Arrays, no_decay: Sequence[str] = ()) -> None:
        self.module = module
        self.arrays = arrays
        self._loss = loss
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._homes: dict[str, int] = {}  # the address of each parameter's memory
        self._deliver: Callable[[str, Any], None] | None = None  # while a backward of ours runs
        self._before: Callable[[int], None] = _ignore
        self._after: Callable[[int], None] = _ignore
        self._lent: dict[str, torch.Tensor] = {}
        self.placements = tuple(self._placements(no_decay))
        self.units = (tuple(p.name for p in self.placements),)

    def _placements(self, no_decay: Sequence[str]) -> list[Placement]:
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for parameter, (name, *_) in names.items():
            if parameter.device.type != "cpu" or parameter.layout != torch.strided:
                raise UnsupportedError(f"parameter {name!r} is {parameter.layout} on device {str(parameter.device)!r}; "
                                       "legal are dense (torch.strided) parameters on 'cpu'")
            self._parameters[name] = parameter
        return [
            Placement(name, tuple(parameter.shape), self.arrays.dtype(parameter), aliases=tuple(aliases),
                      decay=not any(fnmatchcase(name, p) for p in no_decay), frozen=not parameter.requires_grad)
            for parameter, (name, *aliases) in names.items()
        ]

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter's values."""
        return self._parameters[name].detach()

    def bind(self, name: str, parameter: torch.Tensor) -> None:
        """Moves the parameter into the flat view and, unless frozen, hooks its gradient."""
        held = self._parameters[name]
        view = parameter.view(held.shape)
        view.copy_(held.detach())
        held.data = view
        held.grad = None
        self._homes[name] = view.data_ptr()
        if not held.requires_grad:
            return
        earlier = getattr(held, _HOOK, None)  # of another trainer of this module, which `_check_homes` then refuses
        if earlier is not None:
            earlier.remove()
        setattr(held, _HOOK, held.register_post_accumulate_grad_hook(lambda p, name=name: self._accumulated(name, p)))

    def _check_homes(self) -> None:
        """Refuses to train a module whose parameters left their flat views: the optimizer would miss them."""
        for name, address in self._homes.items():
            parameter = self._parameters[name]
            parameter.grad = None  # what somebody else's backward left is not part of our sum
            if parameter.data_ptr() != address:
                raise ConfigError(f"parameter {name!r} has moved since the trainer was made (module.to(...), another "
                                  "trainer of the same module, or an assignment to .data): move first, then adapt once")

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        """Runs when autograd has the gradient of this backward."""
        if self._deliver is None or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad, None
        self._deliver(name, gradient if gradient.layout is torch.strided else gradient.to_dense())

    def watch(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """The whole module is one unit."""
        self._before, self._after = before, after

    def open(self, unit: int) -> list[torch.Tensor]:
        """Gives the storages, to which autograd's graph may refer, their bytes back."""
        arrays = []
        for name in self.units[unit]:
            lent = self._lent[name]
            lent.untyped_storage().resize_(lent.numel() * lent.element_size())
            self._homes[name] = lent.data_ptr()
            arrays.append(lent.view(-1))
        return arrays

    def close(self, unit: int) -> None:
        """Takes the bytes from the storages, which stay the parameters' own."""
        for name in self.units[unit]:
            held = self._parameters[name]
            if name not in self._lent:
                self._lent[name] = torch.empty(held.shape, dtype=held.dtype)
                held.data = self._lent[name]
            self._homes.pop(name, None)
            self._lent[name].untyped_storage().resize_(0)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's persistent buffers (running statistics), as the state dict names them."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: b for name, b in self.module.named_buffers() if name in saved}

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Computes the loss of a micro-batch; the stash is the loss tensor with its graph (None in evaluation)."""
        self._before(0)
        try:
            if training:
                self._check_homes()
                loss_sum, weight = self._checked(self._loss(self.module, micro_batch))
                return (float(loss_sum.detach()), float(weight)), loss_sum
            return self._evaluated(micro_batch), None
        finally:
            self._after(0)

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
        self._before(0)
        self._deliver = deliver
        try:
            if stash.requires_grad:
                stash.backward(None if scale == 1.0 else torch.full_like(stash, scale))
        finally:
            self._deliver = None
            self._after(0)

    def rank_state(self) -> dict[str, bytes]:
        """The state of torch's default generator (dropout draws from it)."""
        return {"torch_rng": torch.get_rng_state().numpy().tobytes()}

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Takes back what `rank_state` gave."""
        if "torch_rng" in state:
            torch.set_rng_state(torch.frombuffer(bytearray(state["torch_rng"]), dtype=torch.uint8))


def _ignore(unit: int) -> None:
    """All memory is there all the time."""
