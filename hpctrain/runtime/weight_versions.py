"""Versions of one rank's weights, each in memory that is not written while a micro-batch may still use it.

    update       needed     home 0   home 1   home 2        pipedream, rank 0 of 3: three homes for three versions
       -                    0*                              * the newest, on which the next update builds
       1         0          0        1*
       2         0 1        0        1        2*            copied from home 1, then updated
       3         1 2        3*       1        2             nobody needs version 0: its home is free
       last                 6*                              nobody needs version 5: updated where it is

The first home is that of the parameters, where they are again at the end. Owns the homes and which one the model
computes with. Must not know schedules: what is needed it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.contracts import Array
from hpctrain.dtypes import dtype_of
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.zero.held import Held, complete

__all__ = ["WeightVersions"]


class _Home:
    """One copy of the trained parameters, whole: a flat buffer for each region, and the optimizer that updates it."""

    def __init__(self, flat: FlatModel, helds: Sequence[Held], optimizer: FlatOptimizer) -> None:
        self.helds, self.optimizer = helds, optimizer
        self.parameters: list[tuple[str, Array]] = [
            (slot.name, held.piece(slot.start, slot.stop))
            for region, held in zip(flat.trained, helds, strict=True) for slot in region.layout.slots]


class WeightVersions:
    """The versions of a step: `begin`, then `use` before each pass of a stage and `update` or `keep`, then `end`."""

    def __init__(self, flat: FlatModel, optimizer: FlatOptimizer) -> None:
        self._flat, self._optimizer, self._arrays = flat, optimizer, flat.model.arrays
        self._homes = [_Home(flat, flat.parameters.held[: len(flat.trained)], optimizer)]
        self._bound = 0
        self._newest = 0
        self._at: dict[int, int] = {}  # the home of each version that is needed, and of the newest

    @property
    def num_homes(self) -> int:
        """Copies of the weights that there is memory for."""
        return len(self._homes)

    @property
    def extra(self) -> list[Array]:
        """The buffers of all homes but the first."""
        return [held.array for home in self._homes[1:] for held in home.helds]

    def begin(self, num_homes: int) -> None:
        """A step begins with version 0, and needs memory for so many. Collective over the data axis."""
        while len(self._homes) < num_homes:
            helds = [self._make(region.layout.count, region.layout.dtype) for region in self._flat.trained]
            self._homes.append(_Home(self._flat, helds, self._optimizer.over(self._flat.own_buffers(helds))))
        self._newest, self._at = 0, {0: 0}

    def _make(self, count: int, dtype: str) -> Held:
        memory = self._flat.group.transport.allocate(count * dtype_of(dtype).num_bytes)
        return Held(((0, count),), self._arrays.from_memory(memory, dtype), whole=True)

    def use(self, version: int) -> None:
        """The model computes with that version. Local."""
        self._bind(self._at[version])

    def _bind(self, number: int) -> None:
        if number != self._bound:
            self._bound = number
            for name, parameter in self._homes[number].parameters:
                self._flat.model.move(name, parameter)

    def update(self, needed: frozenset[int], apply: Callable[[FlatOptimizer], None]) -> None:
        """`apply` makes the next version of the newest; `needed` are older ones. Collective over the data axis."""
        old = self._at[self._newest]
        used = {self._at[version] for version in needed}
        new = old
        if old in used:
            new = next(number for number in range(len(self._homes)) if number not in used)
            self._copy(old, new)
        apply(self._homes[new].optimizer)
        flat = self._flat
        if flat.group.size > 1 and flat.zero.stage:
            for region, held in zip(flat.trained, self._homes[new].helds, strict=True):
                complete(flat.group, region.shards, held)
        self._becomes(needed, new)

    def keep(self, needed: frozenset[int]) -> None:
        """The next version is the newest as it is. Local."""
        self._becomes(needed, self._at[self._newest])

    def _becomes(self, needed: frozenset[int], number: int) -> None:
        self._at = {version: self._at[version] for version in needed}
        self._newest += 1
        self._at[self._newest] = number

    def _copy(self, old: int, new: int) -> None:
        """What this rank updates, where it is updated in place; masters elsewhere write all of it to where it goes."""
        flat = self._flat
        for i, region in enumerate(flat.trained):
            if flat.parameters.masters[i] is flat.parameters.held[i]:
                for start, stop in flat.updated_ranges(region):
                    self._arrays.assign(self._homes[new].helds[i].piece(start, stop),
                                        self._homes[old].helds[i].piece(start, stop))

    def forget(self) -> None:
        """The parameters are what counts, whatever became of the last step. Local."""
        self._bind(0)

    def end(self) -> None:
        """The step is over: the newest version is that of the parameters. Local."""
        newest = self._at[self._newest]
        if newest:
            for held, source in zip(self._homes[0].helds, self._homes[newest].helds, strict=True):
                self._arrays.assign(held.array, source.array)
        self._bind(0)
