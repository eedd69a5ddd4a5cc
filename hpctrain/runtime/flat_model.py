"""A model whose parameters and gradients live in flat buffers that the transport allocated.

Joins Model, Arrays and Transport; decides nothing. All buffers are made here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Model
from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError
from hpctrain.plan.flat import FlatLayout, flat_layouts
from hpctrain.plan.placement import Placement

__all__ = ["FlatBuffers", "FlatModel"]


@dataclass(frozen=True)
class FlatBuffers:
    """The trained parameters of one dtype and their gradients, laid out alike."""

    layout: FlatLayout
    parameters: Array
    gradients: Array


class FlatModel:
    """The flat home of one model's parameters. Collective over `group` to make: all ranks get rank 0's values.

    `trained[i]` are parameters with gradients, `frozen[i]` (layout, buffer) those without, one entry a dtype.
    """

    def __init__(self, model: Model, group: Group) -> None:
        self.model = model
        self.placements: tuple[Placement, ...] = tuple(model.placements)
        _check_same_model(self.placements, group)
        trained = flat_layouts(p for p in self.placements if not p.frozen)
        frozen = flat_layouts(p for p in self.placements if p.frozen)
        self.trained = [FlatBuffers(x, self._new(x, group), self._new(x, group)) for x in trained]
        self.frozen = [(x, self._new(x, group)) for x in frozen]
        for b in self.trained:
            for slot in b.layout.slots:
                span = slice(slot.start, slot.stop)
                model.bind(slot.name, b.parameters[span], b.gradients[span])
        for layout, buffer in self.frozen:
            for slot in layout.slots:
                model.bind(slot.name, buffer[slot.start : slot.stop], None)
        for array in (*(b.parameters for b in self.trained), *(f for _, f in self.frozen), *model.buffers().values()):
            group.broadcast(array)

    def _new(self, layout: FlatLayout, group: Group) -> Array:
        memory = group.transport.allocate(layout.count * dtype_of(layout.dtype).num_bytes)
        return self.model.arrays.from_memory(memory, layout.dtype)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero. Local."""
        for b in self.trained:
            self.model.arrays.fill(b.gradients, 0)

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """(name, flat view of the gradient in memory: a sum over samples, see `optim.clip`). Local."""
        for b in self.trained:
            for slot in b.layout.slots:
                yield slot.name, b.gradients[slot.start : slot.stop]


def _check_same_model(placements: tuple[Placement, ...], group: Group) -> None:
    """Refuses, on all ranks alike, a model that is not the same everywhere."""
    mine = [sorted((key, str(value)) for key, value in asdict(p).items()) for p in placements]
    theirs = group.broadcast_value(mine)
    difference = None
    if len(mine) != len(theirs):
        difference = f"{len(mine)} parameters here, {len(theirs)} on rank 0"
    elif mine != [[tuple(pair) for pair in record] for record in theirs]:
        i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != [tuple(pair) for pair in b])
        difference = f"parameter {i} is {dict(mine[i])} here, {dict(theirs[i])} on rank 0"
    for rank, problem in enumerate(group.exchange(difference)):
        if problem is not None:
            raise ConfigError(f"the model must be the same on all ranks; on rank {rank}: {problem}")
