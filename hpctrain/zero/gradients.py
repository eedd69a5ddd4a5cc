"""From the gradients that a model delivers to their sums over the data axis, while backward is still running.

    backward delivers   b.bias  b.weight        a.bias     a.weight
    bucket 0                     |start ... moves on at each delivery ... |wait
    bucket 1                                               |start ........|wait

    whole gradient      first delivery of a step is stored, later ones are added; the last micro-batch starts reductions
    windows             each micro-batch is a round: deliveries go into a window, its sum to the owners, who add rounds

Owns the homes of gradients. Knows regions and a group; no model, no optimizer. Buckets start in the same order on every
rank, whatever order gradients come in and whichever are missing: a bucket starts when it and all before it are
complete; what never came counts as zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays, Work
from hpctrain.dtypes import dtype_of
from hpctrain.plan.shards import Range
from hpctrain.plan.split import bounds as split_bounds
from hpctrain.zero.held import Held, num_elements
from hpctrain.zero.lender import Lender, Plain
from hpctrain.zero.regions import Region
from hpctrain.zero.windows import Windows

__all__ = ["Gradients"]

NUM_WINDOWS = 2  # one is filled while the other is reduced


@dataclass(eq=False)
class _Bucket:
    """One bucket. Ranges are relative to its start. `memory` is where this round's deliveries go."""

    region: int
    title: str
    count: int
    slots: dict[str, Range]
    gaps: list[Range]
    own: Range
    counts: list[int] | None  # None: even parts
    result: Array  # this rank's part of the sum, in the type that sums are kept in
    memory: Array | None = None
    seen: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


class _Started(NamedTuple):
    """A reduction under way. `part` is where it leaves this rank's sum, to be stored in or added to `target`."""

    work: Work
    bucket: _Bucket
    part: Array
    target: Array
    adds: bool
    window: Array | None


class Gradients:
    """The gradients of trained `regions`, in their types. Collective over the group to make.

    A step: `start()`, then for each micro-batch `begin`, any number of `deliver`, `end`; then `finish`, after which
    `held[i]` has the sums of region i: all of them with `to_all`, else this rank's own ranges. A rank may have no
    micro-batch; where gradients go `in_rounds` it begins and ends as many as the others, without a delivery.

    Args:
        group: the data axis.
        arrays: the library of the gradients.
        regions: the trained ones.
        whole: each rank keeps a whole gradient; otherwise windows and its own ranges.
        to_all: all ranks get the sums (needs `whole`).
        lender: lends what is kept for own ranges only.
        starts: called before each reduction starts.
    """

    def __init__(self, group: Group, arrays: Arrays, regions: Sequence[Region], *, whole: bool, to_all: bool,
                 lender: Lender | None = None, starts: Callable[[], None] | None = None) -> None:
        assert whole or not to_all
        self._starts, self._lender = starts, lender or Plain(arrays)
        self._group, self._arrays, self._regions = group, arrays, regions
        self._alone = group.size == 1
        self._whole, self._to_all = whole or self._alone, to_all
        with group.agree():
            lent = [None if whole else self._lend(i, region) for i, region in enumerate(regions)]
        self.held = [held or self._make_held(region) for held, region in zip(lent, regions, strict=True)]
        self._buckets = [self._make_bucket(i, number) for i, region in enumerate(regions)
                         for number in range(len(region.shards.buckets))]
        for number, bucket in enumerate(self._buckets):
            bucket.title = _title(number, bucket.slots)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.slots}
        self._windows = self._make_windows()
        self._works: deque[_Started] = deque()
        self._completes = False
        self.start()

    def _make_held(self, region: Region) -> Held:
        count, dtype = region.layout.count, region.types.accumulate
        memory = self._group.transport.allocate(count * dtype_of(dtype).num_bytes)
        return Held(((0, count),), self._arrays.from_memory(memory, dtype), whole=True)

    def _lend(self, number: int, region: Region) -> Held:
        count = region.layout.count
        ranges = ((0, count),) if self._alone else region.shards.owned(self._group.rank)
        return Held(ranges, self._lender.zeros("gradient", number, num_elements(ranges), region.types.accumulate),
                    whole=self._alone)

    def _make_bucket(self, index: int, number: int) -> _Bucket:
        shards, held = self._regions[index].shards, self.held[index]
        bucket = shards.buckets[number]
        start, count = bucket.start, bucket.stop - bucket.start
        slots = {s.name: (s.start - start, s.stop - start) for s in shards.layout.slots if s.name in bucket.names}
        edges = [edge for slot in slots.values() for edge in slot]
        gaps = [(a, b) for a, b in pairwise([*edges, count][1:]) if a < b and (a, b) not in slots.values()]
        part = shards.part(number, self._group.rank)
        even = [at + start for at in split_bounds(count, self._group.size)] == list(shards.bounds[number])
        made = _Bucket(index, "", count, slots, gaps, (part[0] - start, part[1] - start),
                       None if even else shards.counts(number), held.piece(*part))
        if self._whole:
            made.memory = held.piece(bucket.start, bucket.stop)
        return made

    def _make_windows(self) -> dict[str, Windows]:
        """By type, where buckets pass through one: always without a whole gradient, else on their way as another."""
        if self._alone:
            return {}
        sizes: dict[str, int] = {}
        for bucket in self._buckets:
            types = self._regions[bucket.region].types
            if not self._whole or types.reduce != types.accumulate:
                sizes[types.reduce] = max(sizes.get(types.reduce, 0), bucket.count)
        return {dtype: Windows(self._group, self._arrays, dtype, count, NUM_WINDOWS)
                for dtype, count in sizes.items()}

    # One step ---------------------------------------------------------------------------------------------------------

    @property
    def windows(self) -> list[Array]:
        """The windows that are free: between steps all of them."""
        return [block for windows in self._windows.values() for block in windows.blocks]

    @property
    def in_rounds(self) -> bool:
        """Whether each micro-batch is reduced by itself, so that all ranks must begin and end equally many."""
        return not self._whole

    def start(self) -> None:
        """A step begins. Local."""
        self._num_rounds = 0
        self._never = set(self._bucket_of)

    def begin(self, *, completes: bool) -> None:
        """A backward begins. `completes`: it is this rank's last one of the step. Local."""
        self._completes = completes or not self._whole
        if self._num_rounds == 0 or not self._whole:
            self._open_round()

    def deliver(self, name: str, gradient: Array) -> None:
        """Takes the gradient of `name` of the backward that runs. Local; may wait for a window's reduction."""
        bucket, arrays = self._bucket_of[name], self._arrays
        if bucket.memory is None:
            bucket.memory = self._take_window(bucket)
        start, stop = bucket.slots[name]
        home = bucket.memory[start:stop]
        if name not in bucket.seen:
            bucket.seen.add(name)
            self._never.discard(name)
            arrays.assign(home, gradient)
        else:
            flat = arrays.flat if arrays.is_contiguous(gradient) else arrays.to_flat
            arrays.combine("sum", home, flat(gradient))
        if self._alone:
            self._lender.release(home)
        if self._completes and not self._alone:
            bucket.missing.discard(name)
            while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
                self._start_next()
            self._group.advance()

    def end(self) -> None:
        """A backward is over. Collective over the group where gradients go `in_rounds`, else local."""
        if not self._whole:
            self._start_rest()

    def start_next(self) -> None:
        """Starts the reduction that comes next, on a rank that only takes part. Collective over the group."""
        self._start_next()

    def finish(self) -> frozenset[str]:
        """Reduces the rest and waits for all; returns the names never delivered here. Collective over the group."""
        if self._whole and not self._num_rounds:
            self._open_round()
        if self._num_rounds:
            self._start_rest()
        else:  # nobody had data
            for held in self.held:
                self._arrays.fill(held.array, 0)
        while self._works:
            self._land()
        return frozenset(self._never)

    # One round --------------------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        self._num_rounds += 1
        self._num_started = 0
        for bucket in self._buckets:
            bucket.seen.clear()
            bucket.missing = {name for name, (start, stop) in bucket.slots.items() if start < stop}

    def _start_rest(self) -> None:
        while self._num_started < len(self._buckets):
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        if bucket.memory is None:
            bucket.memory = self._take_window(bucket)
        for name in bucket.slots.keys() - bucket.seen:
            start, stop = bucket.slots[name]
            self._arrays.fill(bucket.memory[start:stop], 0)
        if not self._alone:
            if self._starts is not None:
                self._starts()
            self._works.append(self._reduce(bucket))

    def _reduce(self, bucket: _Bucket) -> _Started:
        group, arrays = self._group, self._arrays
        types = self._regions[bucket.region].types
        memory, window, adds = bucket.memory, None, False
        assert memory is not None
        own = slice(*bucket.own)
        if not self._whole:
            adds = self._num_rounds > 1
            window, bucket.memory = memory, None
        elif types.reduce != types.accumulate:
            window = self._take_window(bucket)
            arrays.assign(window[: bucket.count], memory)
        wire = memory if window is None else window[: bucket.count]
        if self._to_all:
            work = group.start_all_reduce(wire, name=bucket.title)
            return _Started(work, bucket, wire, memory, adds, window)
        straight = window is not None and not adds and types.reduce == types.accumulate
        part = bucket.result if straight else wire[own]
        work = group.start_reduce_scatter(wire, counts=bucket.counts, out=part, name=bucket.title)
        return _Started(work, bucket, part, bucket.result, adds, window)

    def _land(self) -> None:
        """Waits for the oldest reduction and stores its sum. Works of a group end in the order of their start."""
        started = self._works.popleft()
        started.work.wait()
        if started.window is None:
            return
        if started.adds:
            self._arrays.combine("sum", started.target, started.part)
        elif started.part is not started.target:
            self._arrays.assign(started.target, started.part)
        self._lender.release(started.target)
        self._windows[self._regions[started.bucket.region].types.reduce].give(started.window)

    def _take_window(self, bucket: _Bucket) -> Array:
        windows = self._windows[self._regions[bucket.region].types.reduce]
        while windows.dry and self._works:
            self._land()
        window = windows.take()
        for start, stop in bucket.gaps:
            self._arrays.fill(window[start:stop], 0)
        return window


def _title(number: int, names: Collection[str]) -> str:
    """What a report calls the reduction of a bucket."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"gradients {number}: {min(names, default='none')}{more}"
