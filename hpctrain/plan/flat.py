"""The flat layout: where each parameter lies in one contiguous buffer, and the buckets that are reduced together.

    slots      |a.weight      |a.bias|..|b.weight          |b.bias|        .. = padding to 64 bytes, always zero
    buckets    |<- bucket 1 ------------>|<- bucket 0 ------------>|       backward fills it from the right

Gradients come in about the reverse order of the model, so bucket 0 is at the end. Padding exists only in memory: it
adds nothing to a norm (it is zero) and never reaches a file (`pieces` leaves it out). Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.dtypes import dtype_of
from hpctrain.plan.placement import Placement

__all__ = ["ALIGNMENT", "BUCKET_BYTES", "Bucket", "FlatLayout", "FlatPiece", "Slot", "flat_layouts", "make_buckets"]

ALIGNMENT = 64  # bytes: a cache line and the widest vector register
BUCKET_BYTES = 8 << 20  # of a bucket, unless the user says otherwise


@dataclass(frozen=True)
class Slot:
    """One parameter's home: elements [start, stop) of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatPiece:
    """Elements [start, stop) of tensor `name` (C order), which lie at [flat_start, flat_stop) of the buffer."""

    name: str
    start: int
    stop: int
    flat_start: int
    flat_stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat buffer, reduced together once the gradients of `names` are complete."""

    start: int
    stop: int
    names: frozenset[str]


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of one dtype in one buffer of `count` elements (padding included)."""

    dtype: str
    slots: tuple[Slot, ...]
    count: int

    @cached_property
    def by_name(self) -> dict[str, Slot]:
        """The slots by parameter name."""
        return {slot.name: slot for slot in self.slots}

    def pieces(self, start: int, stop: int) -> Iterator[FlatPiece]:
        """The parts of tensors that lie in [start, stop) of the buffer, in order; empty tensors at their position."""
        for slot in self.slots:
            low, high = max(start, slot.start), min(stop, slot.stop)
            empty_here = slot.start == slot.stop and (start <= slot.start < stop or slot.start == stop == self.count)
            if low < high or empty_here:
                yield FlatPiece(slot.name, low - slot.start, high - slot.start, low, high)

    def rest(self, start: int, stop: int, without: frozenset[str]) -> Iterator[tuple[int, int]]:
        """What is left of [start, stop) without the tensors of these names, in order, no empty ranges if one is cut."""
        cut = False
        for slot in self.slots:
            if slot.name in without and max(start, slot.start) < min(stop, slot.stop):
                if start < slot.start:
                    yield start, slot.start
                start, cut = min(stop, slot.stop), True
        if start < stop or not cut:
            yield start, stop


def flat_layouts(placements: Iterable[Placement]) -> tuple[FlatLayout, ...]:
    """One layout for each dtype, parameters in the given order. Local; the same on every rank."""
    by_dtype: dict[str, list[Placement]] = {}
    for placement in placements:
        by_dtype.setdefault(placement.dtype, []).append(placement)
    return tuple(_layout(dtype, members) for dtype, members in by_dtype.items())


def _layout(dtype: str, placements: Sequence[Placement]) -> FlatLayout:
    unit = max(1, ALIGNMENT // dtype_of(dtype).num_bytes)
    slots, end = [], 0
    for placement in placements:
        slots.append(Slot(placement.name, placement.shape, end, end + placement.count))
        end += -(-placement.count // unit) * unit
    return FlatLayout(dtype, tuple(slots), end)


def make_buckets(layout: FlatLayout, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cuts the buffer from its end at parameter borders, each bucket at least `bucket_bytes` but the last one."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes} must be at least 1")
    wanted = bucket_bytes // dtype_of(layout.dtype).num_bytes
    result: list[Bucket] = []
    stop, names = layout.count, set[str]()
    for slot in reversed(layout.slots):
        names.add(slot.name)
        if stop - slot.start >= max(1, wanted) or slot is layout.slots[0]:
            result.append(Bucket(slot.start, stop, frozenset(names)))
            stop, names = slot.start, set()
    return tuple(result)
