"""Parameters that several stages of a pipeline have: one sum of gradients, one set of bits in all copies.

    stage 0   gradient of "embedding"  -+
                                        |- all-reduce over all ranks that have it: the same sum in each one's gradients
    stage 3   gradient of "embedding"  -+

The sum over stages and over the data axis is one reduction, before anything is shared out, so every copy sees the same
bits and stays equal to the others. All other gradients go on to the collector that reduces them over the data axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Model
from hpctrain.runtime.flat_model import FlatModel

__all__ = ["TiedGradients", "share_values", "tied_groups"]


def tied_groups(world: Group, holders: Mapping[str, Sequence[int]]) -> dict[str, Group | None]:
    """For each parameter of this rank among `holders` the group of the ranks that hold it. Collective over `world`.

    `holders` are the ranks of each, the same on all ranks. None: this rank alone holds it.
    """
    made: dict[tuple[int, ...], Group | None] = {}
    for ranks in sorted({tuple(ranks) for ranks in holders.values()}):
        made[ranks] = world.subgroup(ranks if world.rank in ranks else ()) if len(ranks) > 1 else None
    return {name: made[tuple(ranks)] for name, ranks in sorted(holders.items()) if world.rank in ranks}


def share_values(model: Model, groups: Mapping[str, Group | None]) -> None:
    """Gives all copies the values of the lowest rank that has one. Collective over each group."""
    arrays = model.arrays
    for name, group in groups.items():
        if group is not None:
            values = arrays.to_flat(model.parameter(name))
            group.broadcast(values)
            arrays.assign(model.parameter(name), values)


class TiedGradients:
    """Collects the gradients of all stages of this rank; fulfils `pipeline.run.Collector`.

    A step: `start`, backwards, `finish`. `early`: whether reductions may start before `finish`.
    """

    def __init__(self, flat: FlatModel, groups: Mapping[str, Group | None], *, early: bool = True) -> None:
        self._flat, self._gradients, self._arrays = flat, flat.gradients, flat.model.arrays
        self._homes: dict[str, Array] = {}
        self._sums: dict[str, Array] = {}
        for region, held in zip(flat.trained, flat.gradients.held, strict=True):
            for slot in region.layout.slots:
                if slot.name in groups:
                    self._homes[slot.name] = held.piece(slot.start, slot.stop)
                    self._sums[slot.name] = self._arrays.zeros(slot.stop - slot.start, region.types.accumulate)
        self._groups = {name: group for name, group in groups.items() if name in self._sums}
        self._seen: set[str] = set()
        # A reduction that passes through a window may wait for another pipeline, in the middle of the schedule; where
        # that one waits for a rank of this pipeline, too, nobody would go on. Then all reductions come at the end.
        self._early = early and all(region.types.reduce == region.types.accumulate for region in flat.trained)

    def start(self) -> None:
        """A step begins. Local."""
        self._gradients.start()
        self._seen.clear()
        for total in self._sums.values():
            self._arrays.fill(total, 0)

    def begin(self, *, completes: bool) -> None:
        """A backward of a stage begins. Local."""
        self._gradients.begin(completes=completes and self._early)

    def deliver(self, name: str, gradient: Array) -> None:
        """Takes the gradient of `name` of one backward. Local."""
        if name not in self._sums:
            self._gradients.deliver(name, gradient)
            return
        arrays = self._arrays
        self._seen.add(name)
        arrays.combine("sum", self._sums[name],
                       arrays.flat(gradient) if arrays.is_contiguous(gradient) else arrays.to_flat(gradient))

    def end(self) -> None:
        """The backward is over. Local."""
        self._gradients.end()

    def finish(self) -> frozenset[str]:
        """Reduces all; gives the names that no backward of this rank reached. Collective over the world."""
        works = [group.start_all_reduce(self._sums[name], name=f"gradient of {name}")
                 for name, group in self._groups.items() if group is not None]
        never = self._gradients.finish()
        for work in works:
            work.wait()
        for name, home in self._homes.items():
            self._arrays.assign(home, self._sums[name])
        return never - self._seen
