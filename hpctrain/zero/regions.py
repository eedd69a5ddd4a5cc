"""The flat buffers of a model, as data: what is in each, in which types, and who owns what of it.

A region is a run of parameters that are treated alike: same types, all trained or all frozen, all kept whole or all
spread over the ranks. Pure: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpctrain.plan.flat import Bucket, FlatLayout, flat_layouts, make_buckets
from hpctrain.plan.placement import Placement
from hpctrain.plan.shards import Range, Shards, make_shards
from hpctrain.zero.options import Zero

__all__ = ["Region", "Types", "make_regions"]


class Types(NamedTuple):
    """The element types of one parameter: what the model computes with, in which gradients are added up in memory and
    sent, and in which the values are kept that the update works on.
    """

    compute: str
    accumulate: str
    reduce: str
    master: str


@dataclass(frozen=True)
class Region:
    """One flat buffer. `spread`: a rank keeps its own ranges only, and bucket b is unit `units[b]` of the model."""

    shards: Shards
    types: Types
    frozen: bool
    spread: bool
    units: tuple[int, ...] = ()

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies; the dtype is that of `types.compute`."""
        return self.shards.layout

    def updated_by(self, rank: int, stage: int) -> tuple[Range, ...]:
        """The ranges that `rank` updates."""
        return ((0, self.layout.count),) if stage == 0 else self.shards.owned(rank)


def make_regions(placements: Sequence[Placement], units: Sequence[Sequence[str]], types_of: Callable[[str], Types],
                 zero: Zero, spread: bool, num_ranks: int, *, whole_tensors: bool = False) -> tuple[Region, ...]:
    """Trained regions first, each kind in the model's order; with `spread`, units that are not small in their order."""
    unit_of = {name: u for u, names in enumerate(units) for name in names}
    sizes = [0] * len(units)
    for p in placements:
        sizes[unit_of[p.name]] += p.count
    kinds: dict[tuple[bool, bool, Types], list[Placement]] = {}
    for p in placements:
        types = types_of(p.dtype)
        far = spread and sizes[unit_of[p.name]] >= max(1, zero.threshold)
        kinds.setdefault((p.frozen, far, types), []).append(replace(p, dtype=types.compute))
    regions = []
    for (frozen, far, types), members in sorted(kinds.items(), key=lambda item: item[0][0]):
        if far:
            members.sort(key=lambda p: unit_of[p.name])
        (layout,) = flat_layouts(members)
        buckets = _unit_buckets(layout, unit_of) if far else make_buckets(layout, zero.bucket_bytes)
        shards = make_shards(layout, buckets, num_ranks, whole_tensors=whole_tensors)
        owners = tuple(unit_of[min(b.names)] for b in buckets) if far else ()
        regions.append(Region(shards, types, frozen, far, owners))
    return tuple(regions)


def _unit_buckets(layout: FlatLayout, unit_of: dict[str, int]) -> tuple[Bucket, ...]:
    """One bucket a unit, the last unit first: its gradients come first."""
    starts: dict[int, int] = {}
    names: dict[int, set[str]] = {}
    for slot in layout.slots:
        starts.setdefault(unit_of[slot.name], slot.start)
        names.setdefault(unit_of[slot.name], set()).add(slot.name)
    order = list(starts)
    stops = [*(starts[u] for u in order[1:]), layout.count]
    ends = zip(reversed(order), reversed(stops), strict=True)
    return tuple(Bucket(starts[u], stop, frozenset(names[u])) for u, stop in ends)
