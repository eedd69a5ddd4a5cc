"""Which parameters are treated alike, what is spread in which order, and views of what a rank holds."""

from __future__ import annotations

import numpy as np

from hpctrain.plan.placement import Placement
from hpctrain.zero.held import Held
from hpctrain.zero.options import Zero
from hpctrain.zero.regions import Types, make_regions

PLACEMENTS = [Placement("a", (40,), "float32"), Placement("b", (3,), "float64"), Placement("c", (20,), "float32"),
              Placement("d", (5,), "float32", frozen=True), Placement("e", (30,), "float32"),
              Placement("f", (2,), "float32"), Placement("g", (0,), "float32")]
UNITS = [["e", "f", "g"], ["a", "d"], ["c"], ["b"]]


def types_of(dtype: str) -> Types:
    return Types("bfloat16", "float32", "float32", "float32") if dtype == "float32" else Types(*[dtype] * 4)


def test_alike_is_what_shares_types_and_is_trained() -> None:
    wide, other, frozen = make_regions(PLACEMENTS, UNITS, types_of, Zero(), False, 2)
    assert [s.name for s in wide.layout.slots] == ["a", "c", "e", "f", "g"] and wide.layout.dtype == "bfloat16"
    assert [s.name for s in other.layout.slots] == ["b"] and other.types.master == "float64"
    assert [s.name for s in frozen.layout.slots] == ["d"] and (frozen.frozen, other.frozen) == (True, False)
    assert not any(r.spread or r.units for r in (wide, other, frozen))


def test_spread_units_are_buckets_in_their_order_and_small_ones_stay() -> None:
    regions = make_regions(PLACEMENTS, UNITS, types_of, Zero(3, "none", threshold=21), True, 2)
    spread = [r for r in regions if r.spread]
    assert [([s.name for s in r.layout.slots], r.units, r.frozen) for r in spread] == [
        (["e", "f", "g", "a"], (1, 0), False), (["d"], (1,), True)]
    assert [sorted(b.names) for b in spread[0].shards.buckets] == [["a"], ["e", "f", "g"]]
    assert [b.start for b in spread[0].shards.buckets] == [64, 0]
    assert sorted(s.name for r in regions if not r.spread for s in r.layout.slots) == ["b", "c"]


def test_what_is_updated() -> None:
    region = make_regions(PLACEMENTS, UNITS, types_of, Zero(), False, 2)[0]
    assert region.updated_by(1, stage=0) == ((0, region.layout.count),)
    assert region.updated_by(1, stage=1) == region.shards.owned(1)


def test_views_of_ranges() -> None:
    held = Held([(4, 6), (10, 13)], np.arange(5))
    assert held.piece(5, 6).tolist() == [1] and held.piece(10, 13).tolist() == [2, 3, 4]
    assert held.piece(12, 12).tolist() == []
    held.piece(4, 6)[:] = 7
    assert held.array.tolist() == [7, 7, 2, 3, 4]
