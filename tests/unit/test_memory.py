"""The memory plan: the papers' tables cell by cell, and the exact rows against a count of every element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.optim.precision import Precision
from hpctrain.plan.activations import (
    checkpoint_bytes,
    layer_bytes,
    num_transformer_parameters,
    working_activation_bytes,
    working_state_bytes,
)
from hpctrain.plan.memory import (
    MemoryRow,
    Partition,
    StateTypes,
    by_count,
    by_regions,
    bytes_per_parameter,
    largest_model,
    total,
)
from hpctrain.plan.placement import Placement
from hpctrain.plan.split import part
from hpctrain.runtime.flat_model import types_of
from hpctrain.zero.options import Zero
from hpctrain.zero.regions import Region, make_regions

GB = 1e9
#: ZeRO's arithmetic: gradients stay in the half type.
PAPER = StateTypes("float16", accumulate="float16", master="float32")


def named(rows: Iterable[MemoryRow]) -> dict[str, float]:
    return {row.name: row.num_bytes for row in rows}


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


# ZeRO (arXiv 1910.02054), Table 1: ranks, then stages 1 2 3 of 7.5B, 128B, 1T parameters, in 1e9 bytes.
ZERO_TABLE_1 = cells("""
    1    120  120  120   2048 2048 2048  16000 16000 16000
    4    52.5 41.3 30    896  704  512   7000  5500  4000
    16   35.6 21.6 7.5   608  368  128   4750  2875  1000
    64   31.4 16.6 1.88  536  284  32    4187  2218  250
    256  30.4 15.4 0.47  518  263  8     4046  2054  62.5
    1024 30.1 15.1 0.12  513  257  2     4011  2013  15.6
""")


@pytest.mark.parametrize("row", ZERO_TABLE_1, ids=lambda row: row[0])
def test_zero_table_1(row: list[str]) -> None:
    for printed, (count, stage) in zip(row[1:], product((7.5e9, 128e9, 1e12), (1, 2, 3)), strict=True):
        rows = by_count(count, PAPER, Partition(int(row[0]), stage, num_windows=0))
        unit = 10.0 ** -len(printed.partition(".")[2])  # the paper rounds some cells and cuts others
        assert abs(total(rows) / GB - float(printed)) < unit, (printed, count, stage)


def test_zero_figure_1() -> None:
    found = [total(by_count(7.5e9, PAPER, Partition(64, stage, num_windows=0))) / GB for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


# Table 2: model-parallel ranks, then the largest model in 1e9 parameters at stages 0 1 2 3, on 32 GB and 64 data ranks.
@pytest.mark.parametrize("row", cells("""
    1  2  7.6   14.4  128
    2  4  15.2  28.8  256
    4  8  30.4  57.6  512
    8  16 60.8  115.2 1024
    16 32 121.6 230.4 2048
"""), ids=lambda row: row[0])
def test_zero_table_2(row: list[str]) -> None:
    for stage, printed in enumerate(row[1:]):
        found = largest_model(32 * GB, PAPER, Partition(64, stage), model_parallel=int(row[0]))
        assert found / GB == pytest.approx(float(printed), rel=0.01)


# Megatron-LM's estimator: types, bytes per parameter on one rank, then a + b / d with the distributed optimizer.
@pytest.mark.parametrize("types, plain, whole, divided", [
    (StateTypes("bfloat16"), 18, 6, 12),
    (StateTypes("float16", accumulate="float16", gradient_copy="float32"), 20, 4, 16),
    (StateTypes("float32"), 16, 8, 8),
])
def test_megatrons_bytes_per_parameter(types: StateTypes, plain: int, whole: int, divided: int) -> None:
    assert bytes_per_parameter(types, Partition(8, 0)) == plain
    for d in (1, 2, 3, 8, 1000):
        assert bytes_per_parameter(types, Partition(d, 1)) == pytest.approx(whole + divided / d, rel=1e-12)


@pytest.mark.parametrize("n", [1, 4, 24])
def test_deepspeeds_estimators(n: int) -> None:
    """Half gradients with a float32 copy of the own part: 18 = 2 + 4 + 4 + 8. Two units of 2 bytes each are there."""
    types, count, layer = StateTypes("float16", accumulate="float16", gradient_copy="float32"), 3e9, 1e7
    plan = {"num_ranks": n, "num_windows": 0}
    assert total(by_count(count, types, Partition(stage=2, **plan))) == pytest.approx(2 * count + 18 * count / n)
    plan["num_windows"] = 2
    stage_3 = by_count(count, types, Partition(stage=3, **plan), largest_unit=layer)
    # DeepSpeed's formula for stage 3 has 18 here as well: it leaves out the 2 bytes of the parameters' own part.
    states = sum(r.num_bytes for r in stage_3 if "window" not in r.name and r.name != "unit in use")
    assert states == pytest.approx(20 * count / n)
    assert named(stage_3)["gather windows"] == 4 * layer * (n > 1)
    on_host = {"states": "host", "gradients": "host"}
    plan["num_windows"] = 0
    assert total(by_count(count, types, Partition(stage=2, **plan, **on_host)), "device") == 2 * count
    rows = by_count(count, types, Partition(stage=3, **plan, **on_host, parameters="host"), largest_unit=layer)
    assert total(rows, "device") == 2 * layer * (n > 1)
    assert total(rows, "host") == pytest.approx(20 * count / n)


# ZeRO-Infinity (arXiv 2104.07857): layers, width, states and checkpoints in TiB, the largest operator in GiB.
@pytest.mark.parametrize("layers, width, states, checkpoints, operator", [
    (80, 10240, 1.83, 0.05, 1.5625), (100, 20480, 9.16, 0.12, 6.25), (128, 25600, 18.31, 0.20, 9.765625),
    (195, 65536, 182.81, 0.76, 64), (315, 163840, 1845.70, 3.08, 400),
])
def test_zero_infinitys_table(layers: int, width: int, states: float, checkpoints: float, operator: float) -> None:
    types = StateTypes("float16", accumulate="float16", gradient_copy="float32")
    count = num_transformer_parameters(layers, width)
    assert bytes_per_parameter(types, Partition()) == 20
    assert total(by_count(count, types, Partition())) / 2**40 == pytest.approx(states, abs=0.01)
    assert checkpoint_bytes(32, 1024, width, layers) / 2**40 == pytest.approx(checkpoints, abs=0.01)
    assert working_state_bytes(width) / 2**30 == operator


def test_working_activations_and_sparser_checkpoints() -> None:
    assert working_activation_bytes(4, 8, 16, 2, interval=3) == 4 * 8 * 3 * (16 * 16 + 2 * 2 * 8)
    assert checkpoint_bytes(2, 3, 5, 6, interval=2) == 2 * 2 * 3 * 5 * 3


# Megatron-LM 3 (arXiv 2205.05198): GiB of the first pipeline stage; tensor; + sequence; + selective; both; full.
@pytest.mark.parametrize("batch, heads, width, layers, expected", [
    (4, 64, 6144, 48, (59.25, 39.56, 29.25, 9.56, 4.5)), (1, 96, 12288, 96, (51.75, 32.06, 29.25, 9.56, 4.5)),
    (1, 128, 20480, 105, (86.13, 50.24, 53.32, 17.43, 8.2)), (1, 160, 25600, 128, (131.25, 76.56, 81.25, 26.56, 12.5)),
])
def test_megatrons_activations(batch: int, heads: int, width: int, layers: int, expected: tuple[float, ...]) -> None:
    ways = [{}, {"sequence": True}, {"recompute": "selective"}, {"sequence": True, "recompute": "selective"},
            {"recompute": "full"}]
    for way, gib in zip(ways, expected, strict=True):
        found = layers * layer_bytes(batch, 2048, width, heads, tensor=8, **way) / 2**30
        assert found == pytest.approx(gib, abs=0.01 if gib not in (8.2, 4.5, 12.5) else 0.05), way


def test_an_unknown_way_to_recompute_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute = 'some'"):
        layer_bytes(1, 1, 1, 1, recompute="some")


# -- The exact rows ---------------------------------------------------------------------------------------------------

SIZES = [(7, 5), (3,), (0, 4), (), (40, 3), (1,), (33,), (2, 2)]
MODELS = {
    "uneven": [Placement(f"p{i}", shape, "float32", frozen=i == 4) for i, shape in enumerate(SIZES)],
    "tiny": [Placement("one", (), "float32")],
    "empty": [Placement("none", (0, 3), "float32")],
    "nothing": [],
    "two types": [Placement("a", (5, 7), "float64"), Placement("b", (9,), "float32"),
                  Placement("c", (3,), "int64", frozen=True)],
}


def in_pairs(placements: Sequence[Placement]) -> list[list[str]]:
    """Units of two parameters."""
    return [[p.name for p in placements[i : i + 2]] for i in range(0, len(placements), 2)]


def regions_of(placements: Sequence[Placement], partition: Partition, types: dict[str, str], threshold: int = 0,
               units: Sequence[Sequence[str]] | None = None) -> tuple[Region, ...]:
    zero = Zero(stage=partition.stage, threshold=threshold, bucket_bytes=partition.bucket_bytes)
    spread = partition.stage == 3 and partition.share == "none"
    return make_regions(placements, in_pairs(placements) if units is None else units,
                        lambda dtype: types_of(Precision(**types), dtype), zero, spread, partition.num_ranks)


def exact(placements: Sequence[Placement], rank: int, types: dict[str, str], partition: Partition, threshold: int = 0,
          **others: Any) -> tuple[MemoryRow, ...]:
    return by_regions(regions_of(placements, partition, types, threshold, others.pop("units", None)), rank, partition,
                      **others)


WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}


def counted(placements: Sequence[Placement], rank: int, types: dict[str, str], given: Partition,
            threshold: int) -> dict[str, int]:
    """The rows by looking at every element of every buffer on its own."""
    rows = dict.fromkeys(("parameters", "gradients", "gradient windows", "gradient copy", "master", "moments",
                          "gather windows", "unit in use", "activations"), 0)
    n, node, peers = given.num_ranks, rank // given.ranks_per_node, given.ranks_per_node
    here = [r for r in range(n) if r // peers == node]
    windows: dict[str, int] = {}
    units: dict[int, list[tuple[str, int]]] = {}
    for region in regions_of(placements, given, types, threshold):
        compute, accumulate, reduce, master = region.types
        for number, bucket in enumerate(region.shards.buckets):
            length = bucket.stop - bucket.start
            if region.spread:
                units.setdefault(region.units[number], []).append((compute, length))
            if not region.frozen and n > 1 and (reduce != accumulate or not (given.stage < 2 or
                                                                              given.accumulate == "buffer")):
                windows[reduce] = max(windows.get(reduce, 0), length)
            start, stop = (at - bucket.start for at in region.shards.part(number, rank))
            for i in range(length):
                own = start <= i < stop
                if region.spread:
                    rows["parameters"] += WIDTHS[compute] * own
                elif given.stage < 3 or given.share == "none":
                    rows["parameters"] += WIDTHS[compute]
                if not region.frozen:
                    whole = given.stage < 2 or given.accumulate == "buffer"
                    rows["gradients"] += WIDTHS[accumulate] * (own or whole)
                    rows["master"] += WIDTHS[master] * (own or given.stage == 0) * (master != compute)
                    rows["moments"] += 2 * WIDTHS[master] * (own or given.stage == 0)
        if given.stage == 3 and given.share == "node":
            start, stop = part(region.layout.count, len(here), here.index(rank))
            rows["parameters"] += WIDTHS[compute] * (stop - start)
    rows["gradient windows"] = sum(2 * WIDTHS[name] * count for name, count in windows.items())
    if units:
        each = {name: max(count for parts in units.values() for other, count in parts if other == name)
                for name in {name for parts in units.values() for name, _ in parts}}
        rows["gather windows"] = 2 * max(map(len, units.values())) * sum(WIDTHS[k] * v for k, v in each.items())
        rows["unit in use"] = max(sum(WIDTHS[k] * v for k, v in parts) for parts in units.values())
    return rows


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("types", [{}, {"compute": "bfloat16"}, {"compute": "bfloat16", "reduce": "bfloat16"}], ids=str)
def test_rows_by_regions_count_every_element(model: str, types: dict[str, str]) -> None:
    placements = MODELS[model]
    for n, stage, share, peers, threshold, bucket, accumulate in product(
            (1, 2, 3, 50), (0, 1, 2, 3), ("none", "node"), (1, 2, 3), (0, 38), (1, 200), ("reduce", "buffer")):
        if (share, peers) == ("none", 2) or (accumulate == "buffer" and stage != 2):
            continue
        partition = Partition(n, stage, share, peers, accumulate, bucket)
        for rank in {0, 1, n // 2, n - 1} & set(range(n)):
            expected = counted(placements, rank, types, partition, threshold)
            assert named(exact(placements, rank, types, partition, threshold)) == expected, (partition, rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 50])
def test_own_parts_of_all_ranks_are_one_whole(stage: int, n: int) -> None:
    types = {"compute": "bfloat16"}
    unit = [[p.name for p in MODELS["uneven"]]]
    whole = named(exact(MODELS["uneven"], 0, types, Partition(), units=unit))
    added = dict.fromkeys(whole, 0.0)
    for rank in range(n):
        for row in exact(MODELS["uneven"], rank, types, Partition(n, stage), units=unit):
            added[row.name] += row.num_bytes
    divided = ["master", "moments"] + ["gradients"] * (stage > 1) + ["parameters"] * (stage > 2)
    assert [added[name] for name in divided] == [whole[name] for name in divided]
    assert all(whole[name] > 0 for name in divided)


def test_rows_of_a_nodes_ranks_are_what_the_node_holds() -> None:
    partition = Partition(5, 3, share="node", ranks_per_node=3)  # the second node has two ranks
    rows = [exact(MODELS["uneven"], rank, {}, partition)[0] for rank in range(5)]
    whole = exact(MODELS["uneven"], 0, {}, Partition())[0].num_bytes
    assert {row.where for row in rows} == {"node"}
    assert [sum(r.num_bytes for r in node) for node in (rows[:3], rows[3:])] == [whole, whole]


@pytest.mark.parametrize("stage, share", [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "node")])
@pytest.mark.parametrize("types", [{"compute": "bfloat16"}, {"compute": "float32"},
                                   {"compute": "bfloat16", "reduce": "bfloat16"}], ids=str)
def test_the_two_entry_points_agree_on_large_models(stage: int, share: str, types: dict[str, str]) -> None:
    width, layers = 512, 12
    placements = [Placement(f"{i}.{name}", shape, "float32") for i in range(layers)
                  for name, shape in (("w", (width, 4 * width)), ("b", (width,)), ("v", (4 * width, width)))]
    placements.append(Placement("frozen", (1 << 20,), "float32", frozen=True))
    unit = 8 * width**2 + width
    units = [*([f"{i}.{name}" for name in "wbv"] for i in range(layers)), ["frozen"]]
    partition = Partition(24, stage, share, 8, bucket_bytes=4 * width**2 * (2 if types["compute"] == "bfloat16" else 4))
    regions = exact(placements, 0, types, partition, units=units, activations=5)
    closed = by_count(layers * unit, StateTypes(**types), partition, frozen=1 << 20, activations=5, largest_unit=unit)
    for a, b in zip(regions, closed, strict=True):
        assert (a.name, a.where) == (b.name, b.where)
        assert a.num_bytes == pytest.approx(b.num_bytes, rel=1e-3), a.name


def test_a_trillion_parameters_on_a_million_ranks() -> None:
    rows = named(by_count(1e12, StateTypes("bfloat16"), Partition(1_000_000, 3), largest_unit=12 * 25600.0**2))
    assert rows["moments"] == pytest.approx(8e6)
    assert rows["gather windows"] == 2 * rows["unit in use"] == 2 * 2 * 12 * 25600**2
    assert rows["gradient windows"] == 2 * rows["gather windows"]  # float32


def test_units_that_mix_kinds_have_windows_for_each() -> None:
    placements = [Placement("a", (100,), "float32"), Placement("b", (64,), "float32", frozen=True),
                  Placement("c", (32,), "float32")]
    rows = named(exact(placements, 0, {}, Partition(2, 3), units=[["a", "b"], ["c"]]))
    assert rows["unit in use"] == 4 * (112 + 64)
    assert rows["gather windows"] == 2 * 2 * 4 * 112
    for partition in (Partition(2, 3, share="node", ranks_per_node=2), Partition(2, 2)):
        rows = named(exact(placements, 0, {}, partition))
        assert rows["gather windows"] == rows["unit in use"] == 0


def test_rows_say_where() -> None:
    partition = Partition(2, 3, states="disk", gradients="host", parameters="host")
    where = {row.name: row.where for row in by_count(10, StateTypes(), partition)}
    assert where == {"parameters": "host", "gradients": "host", "gradient windows": "device",
                     "gradient copy": "host", "master": "disk", "moments": "disk", "gather windows": "device",
                     "unit in use": "device", "activations": "device"}
    assert total(by_count(10, StateTypes(num_moments=1), partition), "disk") == 20


@pytest.mark.parametrize("bad, words", [({"stage": 4}, "stage = 4"), ({"share": "all"}, "'node' or 'none'"),
                                        ({"states": "gpu"}, "states = 'gpu'"), ({"num_ranks": 0}, "num_ranks = 0")])
def test_bad_partitions_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Partition(**bad)


@pytest.mark.parametrize("types", [{"compute": "float64"}, {"compute": "float16"}, {"compute": "float32"},
                                   {"compute": "bfloat16", "reduce": "bfloat16"}, {"master": "float64"},
                                   {"compute": "float16", "accumulate": "float16", "master": "float32"}], ids=str)
def test_types_fill_themselves_in_as_those_of_training(types: dict[str, str]) -> None:
    assert StateTypes(**types).filled == types_of(Precision(**types), "float32")
