"""The stages that one rank of a pipeline holds, as one model: one set of parameters for flat buffers and checkpoints.

A parameter that several stages name is one parameter; two copies of a stage on one rank are one Model from the start.
Owns the joining; runs nothing: `pipeline.run` runs the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hpctrain.arrays import arrays_of
from hpctrain.contracts import Array, Arrays, Model, Replicated
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.placement import Placement

__all__ = ["Stages"]


class Stages:
    """`models` by number of stage, ascending; there may be none. Fulfils `contracts.Model` but for passes."""

    splits = False
    replicated: Replicated = False  # asked of each stage by itself

    def __init__(self, models: Mapping[int, Model]) -> None:
        self.models = dict(models)
        self.arrays: Arrays = next((m.arrays for m in self.models.values()), None) or arrays_of(np.empty(0))
        found: dict[str, Placement] = {}
        self._users: dict[str, list[Model]] = {}
        for model in self.models.values():
            for placement in model.placements:
                found.setdefault(placement.name, placement)
                self._users.setdefault(placement.name, []).append(model)
        self.placements = tuple(found.values())
        self.units = tuple((name,) for name in found)

    def parameter(self, name: str) -> Array:
        """The parameter as the lowest stage that has it holds it."""
        return self._users[name][0].parameter(name)

    def bind(self, name: str, parameter: Array) -> None:
        """One home for all stages; the values are those of the lowest."""
        for model in reversed(self._users[name]):
            model.bind(name, parameter)

    def move(self, name: str, parameter: Array) -> None:
        """For all stages."""
        for model in self._users[name]:
            model.move(name, parameter)

    def check(self) -> None:
        """Of all stages."""
        for model in self.models.values():
            model.check()

    def buffers(self) -> Mapping[str, Array]:
        """Of all stages."""
        found: dict[str, Array] = {}
        for stage, model in self.models.items():
            for name, buffer in model.buffers().items():
                if name in found:
                    raise ConfigError(f"stage {stage} has a buffer {name!r}, as an earlier one has; names must differ")
                found[name] = buffer
        return found

    def rank_state(self) -> dict[str, bytes]:
        """Of all stages; names begin with the stage."""
        return {f"{stage}.{name}": value for stage, model in self.models.items()
                for name, value in model.rank_state().items()}

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Takes back what fits: a rank that held other stages then has nothing to take back."""
        for stage, model in self.models.items():
            own = {name: state[f"{stage}.{name}"] for name in model.rank_state() if f"{stage}.{name}" in state}
            if own:
                model.restore_rank_state(own)

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> NoReturn:
        """A rank alone cannot run the whole model."""
        raise UnsupportedError("this rank has only some stages of the model; Trainer.evaluate runs them all")

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Array], None],
                 scale: float = 1.0) -> NoReturn:
        """As `forward`."""
        self.forward(None)

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> NoReturn:
        """As `forward`."""
        self.forward(None)

    def backward_weight(self, rest: Any, deliver: Callable[[str, Array], None]) -> NoReturn:
        """As `forward`."""
        self.forward(None)

    def watch(self, before: Callable[[int], None], after: Callable[[int], None]) -> NoReturn:
        """Parameters of a pipeline are not spread over the ranks (`pipeline_options.check_zero`)."""
        raise AssertionError("zero.stage 3 was refused")

    def open(self, unit: int) -> Sequence[Array]:
        """As `watch`."""
        raise AssertionError("zero.stage 3 was refused")

    def close(self, unit: int) -> NoReturn:
        """As `watch`."""
        raise AssertionError("zero.stage 3 was refused")
