"""An array over some ranges of a flat buffer: all of it, or what this rank owns, the ranges one behind the other.

    flat buffer   |....AAAA........BBB....CC|        ranges  A, B, C
    array         |AAAABBBCC|

Owns the way from flat offsets to views, and the completion of buckets from their owners' parts. Knows not what the
numbers mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays
from hpctrain.plan.shards import Range, Shards

__all__ = ["Held", "buckets_of", "complete", "num_elements"]


def num_elements(ranges: Sequence[Range]) -> int:
    """Elements in `ranges`."""
    return sum(stop - start for start, stop in ranges)


class Held:
    """`array` holds the elements of `ranges`, ascending ranges of a flat buffer.

    `whole`: every rank holds all of the buffer. One that happens to own all of it, where others own nothing, does not
    make it so.
    """

    def __init__(self, ranges: Sequence[Range], array: Array, *, whole: bool = False) -> None:
        self.ranges, self.array, self.whole = tuple(ranges), array, whole
        self._starts = [start for start, _ in ranges]
        self._offsets = [0, *accumulate(stop - start for start, stop in ranges)]

    def piece(self, start: int, stop: int) -> Array:
        """A view of elements [start, stop) of the buffer, which lie in one of the ranges. Local."""
        number = bisect_right(self._starts, start) - 1
        if start == stop:
            return self.array[0:0]
        assert number >= 0 and stop <= self.ranges[number][1], f"[{start}, {stop}) is not held here"
        offset = self._offsets[number] + start - self._starts[number]
        return self.array[offset : offset + stop - start]


def buckets_of(group: Group, arrays: Arrays, shards: Shards, held: Held, *, owned: bool = False) -> Iterator[Array]:
    """All elements of each bucket: a view where it is here, else gathered. Collective over the group.

    `owned`: of what is here only this rank's own ranges count.
    """
    whole = held.whole and not owned
    for number, bucket in enumerate(shards.buckets):
        if whole:
            yield held.piece(bucket.start, bucket.stop)
            continue
        target = arrays.empty(bucket.stop - bucket.start, arrays.dtype(held.array))
        own = held.piece(*shards.part(number, group.rank))
        group.all_gather(own, counts=shards.counts(number), out=target)
        yield target


def complete(group: Group, shards: Shards, held: Held) -> None:
    """Fills a buffer that is here as a whole with what each rank holds of its own. Collective over the group."""
    works = []
    for number, bucket in enumerate(shards.buckets):
        bounds = [at - bucket.start for at in shards.bounds[number]]
        works.append(group.start_all_gather_into(held.piece(bucket.start, bucket.stop), bounds,
                                                 name=f"parameters {number}"))
    for work in works:
        work.wait()
