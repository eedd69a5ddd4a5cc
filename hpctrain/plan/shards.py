"""Who owns which elements of a flat buffer, when the ranks of the data axis share it out.

    buffer      |<- bucket 1 ---------------->|<- bucket 0 --------------->|
    owner       |0      |1      |2      |3    |0      |1      |2     |3    |

Every bucket is shared out over all ranks, so that each reduce-scatter keeps all of them busy, at multiples of 64 bytes:
so two ranks never write one cache line, and arithmetic in vectors gives the same bits wherever borders are. The one
record is read by reduction, update, norm, checkpoint and memory report: an element counts on its owner and nowhere
else. Where an optimizer needs whole tensors the borders are those of tensors. Ranks may own nothing of a bucket. Pure,
standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.dtypes import dtype_of
from hpctrain.plan.flat import ALIGNMENT, Bucket, FlatLayout
from hpctrain.plan.split import bounds as split_bounds

__all__ = ["Range", "Shards", "make_shards"]

Range = tuple[int, int]  # elements [start, stop) of a flat buffer


@dataclass(frozen=True)
class Shards:
    """One flat buffer's owners. `bounds[b][r]` to `bounds[b][r + 1]` of the buffer is what rank r owns of bucket b."""

    layout: FlatLayout
    buckets: tuple[Bucket, ...]
    bounds: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that the buffer is shared out over."""
        return len(self.bounds[0]) - 1 if self.bounds else 1

    def part(self, bucket: int, rank: int) -> Range:
        """What `rank` owns of `bucket`; may be empty."""
        return self.bounds[bucket][rank], self.bounds[bucket][rank + 1]

    def counts(self, bucket: int) -> list[int]:
        """The elements of `bucket` that each rank owns."""
        return [stop - start for start, stop in pairwise(self.bounds[bucket])]

    def owned(self, rank: int) -> tuple[Range, ...]:
        """All that `rank` owns, ascending, without empty ranges; tensors without elements belong to some range.

        Of a buffer without any element, rank 0 owns the one empty range.
        """
        if self.layout.count == 0:
            return ((0, 0),) if rank == 0 else ()
        parts = (self.part(b, rank) for b in range(len(self.buckets)))
        return tuple(sorted((start, stop) for start, stop in parts if start < stop))


def make_shards(layout: FlatLayout, buckets: Sequence[Bucket], num_ranks: int, *,
                whole_tensors: bool = False) -> Shards:
    """Shares every bucket out: evenly, or with `whole_tensors` at tensor borders, balanced over all buckets."""
    if not whole_tensors:
        unit = max(1, ALIGNMENT // dtype_of(layout.dtype).num_bytes)
        cuts = tuple(tuple(b.start + at * unit for at in split_bounds((b.stop - b.start) // unit, num_ranks))
                     for b in buckets)
        return Shards(layout, tuple(buckets), cuts)
    loads = [0] * num_ranks
    return Shards(layout, tuple(buckets), tuple(_between_tensors(layout, bucket, loads) for bucket in buckets))


def _between_tensors(layout: FlatLayout, bucket: Bucket, loads: list[int]) -> tuple[int, ...]:
    """Borders that keep the largest load, earlier buckets included, smallest; adds this bucket to `loads`."""
    starts = [slot.start for slot in layout.slots if slot.name in bucket.names]
    edges = [*starts, bucket.stop]
    low, high = max(loads), max(loads) + bucket.stop - bucket.start
    while low < high:  # the smallest limit that all tensors fit under
        middle = (low + high) // 2
        if _fill(edges, loads, middle)[-1] == len(starts):
            high = middle
        else:
            low = middle + 1
    cuts = _fill(edges, loads, high)
    borders = (bucket.start, *(edges[i] for i in cuts))
    for rank, (start, stop) in enumerate(pairwise(borders)):
        loads[rank] += stop - start
    return borders


def _fill(edges: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    """For each rank how many tensors it and those before it take, each as many as stay under `limit`."""
    cuts, taken = [], 0
    for load in loads:
        start = edges[taken]
        while taken < len(edges) - 1 and load + edges[taken + 1] - start <= limit:
            taken += 1
        cuts.append(taken)
    return cuts
