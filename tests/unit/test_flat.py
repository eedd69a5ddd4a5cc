"""Flat layouts and buckets: every parameter has a home, padding belongs to nobody, buckets cover all."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.flat import flat_layouts, make_buckets
from hpctrain.plan.placement import Placement
from hpctrain.plan.split import intervals

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


def layout_of(sizes: list[tuple[int, ...]], dtype: str = "float32"):
    return flat_layouts(Placement(f"p{i}", s, dtype) for i, s in enumerate(sizes))[0]


@given(shapes)
def test_slots_are_aligned_and_do_not_overlap(sizes: list[tuple[int, ...]]) -> None:
    layout, end = layout_of(sizes), 0
    for slot, shape in zip(layout.slots, sizes, strict=True):
        assert slot.start % 16 == 0 and slot.start >= end and slot.stop - slot.start == prod(shape)
        end = slot.stop
    assert layout.count >= end and layout.count % 16 == 0


@given(shapes, st.integers(1, 5))
def test_the_parts_of_any_split_cover_every_tensor_once(sizes: list[tuple[int, ...]], num_parts: int) -> None:
    layout = layout_of(sizes)
    seen: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in layout.slots}
    for start, stop in intervals(layout.count, num_parts):
        for piece in layout.pieces(start, stop):
            assert piece.flat_stop - piece.flat_start == piece.stop - piece.start
            assert start <= piece.flat_start and piece.flat_stop <= stop
            seen[piece.name].append((piece.start, piece.stop))
    for slot in layout.slots:
        count, covered = slot.stop - slot.start, [e for a, b in seen[slot.name] for e in range(a, b)]
        assert covered == list(range(count))
        assert count > 0 or layout.count == 0 or len(seen[slot.name]) == 1, "an empty tensor has one (empty) piece"


@given(shapes, st.integers(1, 400))
def test_buckets_go_from_the_end_to_the_start(sizes: list[tuple[int, ...]], num_bytes: int) -> None:
    layout = layout_of(sizes)
    buckets = make_buckets(layout, num_bytes)
    assert [b.start for b in buckets[:-1]] == [b.stop for b in buckets[1:]]
    assert (buckets[0].stop, buckets[-1].start) == (layout.count, 0)
    assert sorted(n for b in buckets for n in b.names) == sorted(s.name for s in layout.slots)
    for bucket in buckets:
        for slot in layout.slots:
            if slot.name in bucket.names:
                assert bucket.start <= slot.start <= slot.stop <= bucket.stop


def test_one_layout_a_dtype() -> None:
    sizes = [("a", (3,), "float32"), ("b", (2,), "float64"), ("c", (), "float32")]
    layouts = flat_layouts(Placement(*size) for size in sizes)
    found = [(x.dtype, [s.name for s in x.slots], x.count) for x in layouts]
    assert found == [("float32", ["a", "c"], 32), ("float64", ["b"], 8)]


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bucket_bytes = 0"):
        make_buckets(layout_of([(3,)]), 0)


def test_the_rest_of_a_range_without_some_tensors():
    (layout,) = flat_layouts([Placement(name, (count,), "float64") for name, count in (("a", 8), ("b", 3), ("c", 8))])
    assert list(layout.rest(0, 24, frozenset())) == [(0, 24)]
    assert list(layout.rest(0, 24, frozenset("a"))) == [(8, 24)]
    assert list(layout.rest(0, 24, frozenset("b"))) == [(0, 8), (11, 24)]
    assert list(layout.rest(2, 9, frozenset("ab"))) == []
    assert list(layout.rest(10, 20, frozenset("bc"))) == [(11, 16)]  # padding
    assert list(layout.rest(5, 5, frozenset())) == [(5, 5)]
