"""Every element has one owner, each bucket is shared out over all ranks, tensors stay whole where they must."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpctrain.plan.flat import FlatLayout, flat_layouts, make_buckets
from hpctrain.plan.placement import Placement
from hpctrain.plan.shards import make_shards


def layout_of(*counts: int) -> FlatLayout:
    (layout,) = flat_layouts(Placement(f"p{i}", (count,), "float32") for i, count in enumerate(counts))
    return layout


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("counts", [(5,), (0,), (0, 0), (3, 0, 40, 1), (100, 1, 0), (0, 17, 33, 2, 64, 9)])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_element_and_every_empty_tensor_has_one_owner(counts: tuple[int, ...], num_ranks: int,
                                                            whole_tensors: bool, bucket_bytes: int) -> None:
    layout = layout_of(*counts)
    shards = make_shards(layout, make_buckets(layout, bucket_bytes), num_ranks, whole_tensors=whole_tensors)
    owned = sorted(r for rank in range(num_ranks) for r in shards.owned(rank))
    assert owned[0][0] == 0 and owned[-1][1] == layout.count
    assert all(a[1] == b[0] for a, b in pairwise(owned))
    assert sum(sum(shards.counts(b)) for b in range(len(shards.buckets))) == layout.count
    pieces = [p for start, stop in owned for p in layout.pieces(start, stop)]
    assert {p.name for p in pieces} == {slot.name for slot in layout.slots}
    empty = [p.name for p in pieces if p.start == p.stop]
    assert len(set(empty)) == len(empty)
    if whole_tensors:
        assert len(pieces) == len(layout.slots)


def test_each_bucket_is_shared_out_over_all_ranks() -> None:
    layout = layout_of(160, 160, 160)
    shards = make_shards(layout, make_buckets(layout, 640), 3)  # 10 units of 16 elements each
    assert shards.bounds == ((320, 384, 432, 480), (160, 224, 272, 320), (0, 64, 112, 160))
    assert shards.owned(1) == ((64, 112), (224, 272), (384, 432)) and shards.counts(0) == [64, 48, 48]


def test_more_ranks_than_cache_lines_leaves_some_without() -> None:
    layout = layout_of(2, 16)
    shards = make_shards(layout, make_buckets(layout, 1 << 20), 4)
    assert [shards.owned(rank) for rank in range(4)] == [((0, 16),), ((16, 32),), (), ()]


def test_whole_tensors_are_balanced_over_all_buckets() -> None:
    layout = layout_of(*[160] * 6)
    shards = make_shards(layout, make_buckets(layout, 640), 3, whole_tensors=True)  # one tensor a bucket
    assert [sum(stop - start for start, stop in shards.owned(rank)) for rank in range(3)] == [320, 320, 320]
    layout = layout_of(16, 160, 16, 16, 16, 160)
    shards = make_shards(layout, make_buckets(layout, 1 << 20), 2, whole_tensors=True)
    assert shards.bounds == ((0, 192, 384),)
