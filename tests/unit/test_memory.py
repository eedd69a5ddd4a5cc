"""The memory plan: the papers' tables cell by cell, and the exact rows against a count of every element."""

from __future__ import annotations

from itertools import product
from math import floor, prod

import pytest

from hpctrain.errors import ConfigError
from hpctrain.plan.activations import (
    checkpoint_bytes,
    layer_bytes,
    num_transformer_parameters,
    working_activation_bytes,
    working_state_bytes,
)
from hpctrain.plan.flat import flat_layouts, make_buckets
from hpctrain.plan.memory import (
    Partition,
    StateTypes,
    by_count,
    by_layout,
    bytes_per_parameter,
    largest_model,
    total,
)
from hpctrain.plan.placement import Placement
from hpctrain.plan.split import part

GB = 1e9
#: ZeRO's arithmetic: gradients stay in the half type.
PAPER = StateTypes("float16", accumulate="float16", master="float32")


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
    (StateTypes("float16", accumulate="float16", reduce="float32"), 20, 4, 16),
    (StateTypes("float32"), 16, 8, 8),
])
def test_megatrons_bytes_per_parameter(types: StateTypes, plain: int, whole: int, divided: int) -> None:
    assert bytes_per_parameter(types, Partition(8, 0)) == plain
    for d in (1, 2, 3, 8, 1000):
        assert bytes_per_parameter(types, Partition(d, 1)) == pytest.approx(whole + divided / d, rel=1e-12)


@pytest.mark.parametrize("n", [1, 4, 24])
def test_deepspeeds_estimators(n: int) -> None:
    """Half gradients with a float32 copy of the own part: 18 = 2 + 4 + 4 + 8. Two units of 2 bytes each are there."""
    types, count, layer = StateTypes("float16", accumulate="float16", reduce="float32"), 3e9, 1e7
    plan = {"num_ranks": n, "num_windows": 0}
    assert total(by_count(count, types, Partition(stage=2, **plan))) == pytest.approx(2 * count + 18 * count / n)
    stage_3 = total(by_count(count, types, Partition(stage=3, **plan), largest_unit=layer))
    # DeepSpeed's formula for stage 3 has 18 here as well: it leaves out the 2 bytes of the parameters' own part.
    assert stage_3 == pytest.approx(20 * count / n + 4 * layer * (n > 1))
    on_host = {"states": "host", "gradients": "host"}
    assert total(by_count(count, types, Partition(stage=2, **plan, **on_host)), "device") == 2 * count
    rows = by_count(count, types, Partition(stage=3, **plan, **on_host, parameters="host"), largest_unit=layer)
    assert total(rows, "device") == 4 * layer * (n > 1)
    assert total(rows, "host") == pytest.approx(20 * count / n)


# ZeRO-Infinity (arXiv 2104.07857): layers, width, states and checkpoints in TiB, the largest operator in GiB.
@pytest.mark.parametrize("layers, width, states, checkpoints, operator", [
    (80, 10240, 1.83, 0.05, 1.5625), (100, 20480, 9.16, 0.12, 6.25), (128, 25600, 18.31, 0.20, 9.765625),
    (195, 65536, 182.81, 0.76, 64), (315, 163840, 1845.70, 3.08, 400),
])
def test_zero_infinitys_table(layers: int, width: int, states: float, checkpoints: float, operator: float) -> None:
    types = StateTypes("float16", accumulate="float16", reduce="float32")
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
PARTITIONS = [dict(zip(("num_ranks", "stage", "share", "ranks_per_node", "threshold", "bucket_bytes"), values,
                       strict=True))
              for values in product((1, 2, 3, 4, 50), (0, 1, 2, 3), ("none", "node"), (1, 2, 3), (0, 4), (1, 200))]


def counted(placements: list[Placement], rank: int, types: StateTypes, given: Partition) -> dict[str, float]:
    """The rows by looking at every element of every buffer on its own."""
    sizes = {"half": 2, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
    rows = dict.fromkeys(("parameters", "gradients", "gradient windows", "master", "moments"), 0)
    by_type: dict[tuple[str, bool], list[Placement]] = {}
    for p in placements:
        compute = types.compute if types.compute and p.dtype != "int64" else p.dtype
        by_type.setdefault((compute, p.frozen), []).append(
            Placement(p.name, p.shape, compute, frozen=p.frozen))
    n, divided = given.num_ranks, given.stage
    node = rank // given.ranks_per_node
    peers = [r for r in range(n) if r // given.ranks_per_node == node]
    for (compute, frozen), members in by_type.items():
        wide = "float64" if compute == "float64" else "float32"
        layout = flat_layouts(members)[0]
        small = {i for s in layout.slots if prod(s.shape) < given.threshold for i in range(s.start, s.stop)}
        lengths = []
        for bucket in make_buckets(layout, given.bucket_bytes):
            start, stop = part(bucket.stop - bucket.start, n, rank)
            lengths.append(bucket.stop - bucket.start)
            for i in range(bucket.start, bucket.stop):
                own = start <= i - bucket.start < stop
                if divided < 3 or (given.share == "none" and (own or i in small)):
                    rows["parameters"] += sizes[compute]
                if not frozen:
                    rows["gradients"] += sizes[wide] * (own or divided < 2)
                    rows["master"] += sizes[wide] * (own or divided < 1) * (wide != compute)
                    rows["moments"] += 2 * sizes[wide] * (own or divided < 1)
        if divided == 3 and given.share == "node":
            start, stop = part(layout.count, len(peers), peers.index(rank))
            rows["parameters"] += sizes[compute] * (stop - start)
        if divided > 1 and n > 1 and not frozen and lengths:
            rows["gradient windows"] += sizes[wide] * max(lengths) * min(2, len(lengths))
    return rows


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compute", [None, "float32", "bfloat16"])
def test_rows_by_layout_count_every_element(model: str, compute: str | None) -> None:
    types, placements = StateTypes(compute), MODELS[model]
    for given in PARTITIONS:
        partition = Partition(**given)
        for rank in {0, 1, partition.num_ranks // 2, partition.num_ranks - 1} & set(range(partition.num_ranks)):
            rows = {row.name: row.num_bytes for row in by_layout(placements, rank, types, partition)}
            expected = counted(placements, rank, types, partition)
            assert {name: rows[name] for name in expected} == expected, (given, rank)
            assert rows["gather window"] == rows["activations"] == rows["reduced gradients"] == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 50])
def test_own_parts_of_all_ranks_are_one_whole(stage: int, n: int) -> None:
    types = StateTypes("bfloat16", reduce="float64")
    whole = {r.name: r.num_bytes for r in by_layout(MODELS["uneven"], 0, types, Partition())}
    added = dict.fromkeys(whole, 0.0)
    for rank in range(n):
        for row in by_layout(MODELS["uneven"], rank, types, Partition(n, stage)):
            added[row.name] += row.num_bytes
    divided = ["reduced gradients", "master", "moments"] + ["gradients"] * (stage > 1) + ["parameters"] * (stage > 2)
    assert [added[name] for name in divided] == [whole[name] for name in divided]
    assert all(whole[name] > 0 for name in divided)


def test_rows_of_a_nodes_ranks_are_what_the_node_holds() -> None:
    partition = Partition(5, 3, share="node", ranks_per_node=3)  # the second node has two ranks
    rows = [by_layout(MODELS["uneven"], rank, StateTypes(), partition)[0] for rank in range(5)]
    whole = by_layout(MODELS["uneven"], 0, StateTypes(), Partition())[0].num_bytes
    assert {row.where for row in rows} == {"node"}
    assert [sum(r.num_bytes for r in node) for node in (rows[:3], rows[3:])] == [whole, whole]


@pytest.mark.parametrize("stage, share", [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "node")])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_the_two_entry_points_agree_on_large_models(stage: int, share: str, compute: str) -> None:
    width, layers = 500, 12
    placements = [Placement(f"{i}.{name}", shape, "float32", frozen=i == 3) for i in range(layers)
                  for name, shape in (("w", (width, 4 * width)), ("b", (width,)), ("v", (4 * width, width)))]
    count = sum(p.count for p in placements if not p.frozen)
    frozen = sum(p.count for p in placements if p.frozen)
    units = [[f"{i}.{name}" for name in "wbv"] for i in range(layers)]
    partition = Partition(24, stage, share=share, ranks_per_node=8, bucket_bytes=1 << 16, num_windows=0)
    exact = by_layout(placements, 0, StateTypes(compute), partition, units=units, activations=5)
    closed = by_count(count, StateTypes(compute), partition, frozen=frozen, activations=5,
                      largest_unit=8 * width**2 + width)
    for a, b in zip(exact, closed, strict=True):
        assert (a.name, a.where) == (b.name, b.where)
        assert a.num_bytes == pytest.approx(b.num_bytes, rel=1e-3), a.name


def test_gradient_windows_of_both_entry_points_agree() -> None:
    placements = [Placement(f"p{i}", (1 << 14,), "float32") for i in range(64)]
    partition = Partition(4, 2, bucket_bytes=1 << 18)
    windows = [next(r.num_bytes for r in rows if r.name == "gradient windows") for rows in (
        by_layout(placements, 0, StateTypes(), partition), by_count(64 * (1 << 14), StateTypes(), partition))]
    assert windows == [2 << 18, 2 << 18]


def test_a_trillion_parameters_on_a_million_ranks() -> None:
    rows = by_count(1e12, StateTypes("bfloat16"), Partition(1_000_000, 3), largest_unit=12 * 25600.0**2)
    assert next(r.num_bytes for r in rows if r.name == "moments") == pytest.approx(8e6)
    assert next(r.num_bytes for r in rows if r.name == "gather window") == 2 * 2 * 12 * 25600**2


def test_the_gather_window_holds_two_neighbours_and_no_small_parameters() -> None:
    placements = [Placement(name, (count,), "float32", frozen=name == "d")
                  for name, count in {"a": 100, "b": 3, "c": 60, "d": 50}.items()]
    units = [["a"], ["b"], ["c", "d"]]
    for threshold, largest in ((0, 113), (4, 110)):
        partition = Partition(2, 3, threshold=threshold)
        rows = {r.name: r.num_bytes for r in by_layout(placements, 1, StateTypes("bfloat16"), partition, units=units)}
        assert rows["gather window"] == 2 * largest
    for partition in (Partition(1, 3), Partition(2, 3, share="node", ranks_per_node=2), Partition(2, 2)):
        assert by_layout(placements, 0, StateTypes(), partition, units=units)[6].num_bytes == 0
    assert by_layout(placements, 0, StateTypes(), Partition(2, 3), units=[["a", "b"]])[6].num_bytes == 4 * 103


def test_whole_gradients_while_micro_batches_add_up() -> None:
    rows = by_layout(MODELS["uneven"], 0, StateTypes(), Partition(4, 2, accumulate="buffer"))
    plain = by_layout(MODELS["uneven"], 0, StateTypes(), Partition(4, 1))
    assert rows[1] == plain[1] and rows[2].num_bytes == 0


def test_rows_say_where() -> None:
    partition = Partition(2, 3, states="disk", gradients="host", parameters="host")
    where = {row.name: row.where for row in by_count(10, StateTypes(), partition)}
    assert where == {"parameters": "host", "gradients": "host", "gradient windows": "device",
                     "reduced gradients": "host", "master": "disk", "moments": "disk", "gather window": "device",
                     "activations": "device"}


@pytest.mark.parametrize("bad, words", [({"stage": 4}, "stage = 4"), ({"share": "all"}, "'node' or 'none'"),
                                        ({"states": "gpu"}, "states = 'gpu'"), ({"num_ranks": 0}, "num_ranks = 0")])
def test_bad_partitions_are_refused(bad: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Partition(**bad)


def test_types_fill_themselves_in() -> None:
    assert StateTypes().resolve("float64") == StateTypes("float64", "float64", "float64", "float64")
    assert StateTypes().resolve("float16") == StateTypes("float16", "float32", "float32", "float32")
    assert StateTypes("bfloat16", reduce="bfloat16").resolve("float64").reduce == "bfloat16"
    assert StateTypes("bfloat16").resolve("int32").compute == "int32"
    assert floor(bytes_per_parameter(StateTypes("bfloat16", num_moments=1), Partition())) == 14
