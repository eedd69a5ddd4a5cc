"""Bus bandwidth against numbers worked out by hand; rows; a winner that does not flap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.bench.figures import Measured, bus_factor, ratios, row, rows_of, shown_bytes
from hpctrain.bench.survey import Request
from hpctrain.bench.tune import merge, tuned_rows, winners
from hpctrain.cli.bench import parse_size
from hpctrain.collectives.choice_row import Row, check_rows
from hpctrain.collectives.choose import Chooser
from hpctrain.errors import ConfigError


@pytest.mark.parametrize("operation, num_ranks, factor", [
    ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_reduce", 8, 1.75), ("all_reduce", 1, 0.0),
    ("reduce_scatter", 4, 0.75), ("all_gather", 2, 0.5), ("all_to_all", 8, 0.875), ("scatter", 4, 0.75),
    ("gather", 4, 0.75), ("send_recv", 4, 2.0), ("send_recv", 1, 0.0),
    ("broadcast", 2, 1.0), ("broadcast", 1000, 1.0), ("reduce", 4, 1.0),
])  # fmt: skip
def test_bus_factors(operation, num_ranks, factor):
    assert bus_factor(operation, num_ranks) == factor


def measured(operation="all_reduce", num_bytes=4000, num_ranks=4, times=None, native=None):
    return Measured(operation, "float32", num_bytes, num_ranks, times or {"ring": [1e-6, 2e-6, 3e-6]}, [1e-6], native)


def test_bus_bandwidth_is_size_over_time_times_factor():
    # 4 ranks, 4000 bytes in 2 us: 2 GB/s; each rank's link carries 2 * 3/4 of the array in an all-reduce.
    assert measured().bus_bandwidth(2e-6) == pytest.approx(3e9)
    assert measured("all_gather").bus_bandwidth(2e-6) == pytest.approx(1.5e9)
    assert measured("broadcast").bus_bandwidth(2e-6) == pytest.approx(2e9)


def test_rows():
    times = {"ring": [1e-6, 2e-6, 3e-6], "MPI": [2e-6, 2e-6, 1e-6]}
    rows = rows_of(measured(times=times, native="MPI"))
    assert all(list(r) == ["work", "contender", "unit", "median", "low", "high", "runs"] for r in rows)
    found = {(r["contender"], r["unit"]): r["median"] for r in rows}
    assert found == {("ring", "us"): 2.0, ("ring", "GB/s bus bandwidth"): 3.0, ("ring", "of MPI's time"): 1.0,
                     ("MPI", "us"): 2.0, ("MPI", "GB/s bus bandwidth"): 3.0, ("memory copy", "GB/s"): 4.0}
    assert {r["work"] for r in rows} == {"all_reduce float32 4000 B, 4 ranks"}
    assert [r["runs"] for r in rows] == [3, 3, 3, 3, 3, 1]
    assert (rows[2]["low"], rows[2]["high"]) == (0.75, 2.0), "quartiles of 0.5, 1, 3: ratios within the rounds"
    low, median, high = (row("", "", "", [5.0, 1.0])[name] for name in ("low", "median", "high"))
    assert 1.0 <= low <= median <= high <= 5.0, "however few the samples"


def test_ratios_need_the_same_rounds():
    assert ratios([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_sizes_for_people():
    assert [shown_bytes(n) for n in (5, 1024, 1536, 4 << 20, 1 << 30)] == ["5 B", "1 KiB", "1536 B", "4 MiB", "1 GiB"]
    assert [parse_size(word) for word in ("5", "4KiB", " 1.5 mib", "2G", "64 k", "7B")] == [
        5, 4096, 3 << 19, 2 << 30, 65536, 7]
    for word in ("", "x", "1.5", "4XB", "-4", "0", "1e999", "inf", "nan", "KiB", "4 KiB 2"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_size(word)


def test_requests_name_wrong_words():
    with pytest.raises(ConfigError, match="--operations: 'allreduce' .*did you mean 'all_reduce'"):
        Request(("allreduce",), ("float32",), (1,))
    with pytest.raises(ConfigError, match="--algorithms: 'rnig' .*did you mean 'ring'"):
        Request(("all_reduce",), ("float32",), (1,), ("rnig",))
    with pytest.raises(ConfigError, match="--dtypes: 'float31' .*did you mean 'float32'"):
        Request(("all_reduce",), ("float31",), (1,))


def path(*pairs):
    return [{"a": a, "b": b} for a, b in pairs]


@pytest.mark.parametrize("seconds, incumbent, expected", [
    (path((1.0, 2.0), (4.0, 3.0)), "a", "ab"),             # a clear change
    (path((1.0, 1.05), (1.05, 1.0), (1.0, 1.05)), "a", "aaa"),  # within the noise: no flapping
    (path((1.0, 1.2), (1.2, 1.0), (1.0, 1.2)), "a", "aaa"),     # one size is not worth two changes
    (path((1.0, 1.5), (1.5, 1.0), (1.0, 1.5)), "a", "aba"),     # here it is
    (path((1.0, 2.0), (1.1, 1.0), (1.1, 1.0)), "a", "abb"),     # two small gains add up
    (path((1.1, 1.0),), "a", "a"),                              # the incumbent stays
    (path((1.1, 1.0),), "b", "b"),
    (path((1.3, 1.0),), "a", "b"),
    (path((2.0, 2.0), (2.0, 2.0)), "b", "bb"),
])  # fmt: skip
def test_winners(seconds, incumbent, expected):
    assert "".join(winners(seconds, incumbent)) == expected


@given(st.lists(st.fixed_dictionaries({name: st.floats(1e-6, 1.0) for name in "abc"}), min_size=1, max_size=7))
def test_winners_are_no_worse_than_any_single_algorithm(seconds):
    chosen = winners(seconds, "a")
    assert len(chosen) == len(seconds)

    def product(names):
        result = 1.0
        for times, name in zip(seconds, names, strict=True):
            result *= times[name]
        return result

    changes = sum(x != y for x, y in zip(["a", *chosen], chosen, strict=False))
    for name in "abc":
        alone = product([name] * len(seconds)) * (1.0 if name == "a" else 1.15)
        assert product(chosen) * 1.15**changes <= alone * 1.001


def sweep(operation="all_gather", num_ranks=2):
    def one(num_bytes, ring, naive):
        return measured(operation, num_bytes, num_ranks, {"ring": [ring] * 3, "naive": [naive] * 3, "MPI": [1e-9] * 3})

    return [one(1 << 10, 2e-5, 1e-5), one(1 << 14, 3e-5, 2e-5), one(1 << 18, 1e-4, 3e-4)]


def test_tuned_rows_meet_half_way():
    rows = tuned_rows(sweep(), 1)
    check_rows(rows, "tuned")
    assert [(row.algorithm, row.bytes) for row in rows] == [("naive", (0, (1 << 16) - 1)), ("ring", (1 << 16, None))]
    assert {(row.ranks, row.nodes, row.dtypes) for row in rows} == {((2, 2), (1, 1), "any")}
    assert rows[1].reason == "measured at 256 KiB: 100 us, next naive 300 us"
    assert Chooser(rows).choose("all_gather", 65535, 2, 1, "int8").algorithm == "naive"
    assert tuned_rows(sweep("all_reduce"), 1)[0].dtypes == "plain", "half sums were not measured"


def test_what_is_not_offered_at_some_size_is_no_winner_there():
    first, _, third = sweep()
    rows = tuned_rows([first, measured("all_gather", 1 << 14, 2, {"ring": [3e-5]}), third], 1)
    assert [row.algorithm for row in rows] == ["naive", "ring"]
    assert "next" not in tuned_rows([measured("all_gather", 1 << 14, 2, {"ring": [3e-5]})], 1)[0].reason


def test_behind_what_not_every_call_has_comes_the_next_best():
    times = [{"ring": 3e-5, "naive": 2e-5, "native": 1e-5}, {"ring": 3e-4, "naive": 5e-4, "native": 1e-4},
             {"ring": 4e-3, "naive": 9e-3, "native": 2e-3, "shared memory": 1e-3}]
    rows = tuned_rows([measured("all_gather", 1 << 10 << 4 * k, 2, {name: [t] for name, t in each.items()})
                       for k, each in enumerate(times)], 1)
    check_rows(rows, "tuned")
    assert [row.algorithm for row in rows] == ["native", "naive", "ring", "shared memory", "native", "ring"]

    def choices_of(num_bytes):
        chooser = Chooser(rows)
        return [chooser.choose("all_gather", num_bytes, 2, 1, "int8", frozenset(ways)).algorithm
                for ways in (["native", "shared memory"], ["native"], [])]

    assert choices_of(1 << 10) == ["native", "native", "naive"]
    assert choices_of(1 << 14) == ["native", "native", "ring"]
    assert choices_of(1 << 18) == ["shared memory", "native", "ring"]


def test_two_levels_on_one_node_are_no_winner():
    times = {"ring": [2e-5] * 3, "two-level": [1e-5] * 3}
    one = measured(times=times)
    assert [row.algorithm for row in tuned_rows([one], 1)] == ["ring"]
    assert [row.algorithm for row in tuned_rows([one], 2)] == ["two-level"]
    assert tuned_rows([measured(times={"MPI": [1e-6]})], 1) == []


def test_merging_replaces_what_was_measured_again():
    by_hand = Row("all_gather", "ring", "by hand", ranks=(2, 8))
    old = [*tuned_rows(sweep(num_ranks=4), 1), *tuned_rows(sweep(num_ranks=2), 1), by_hand]
    new = [Row("all_gather", "ring", "now", ranks=(2, 2), nodes=(1, 1))]
    merged = merge(old, new)
    assert merged == [*new, *tuned_rows(sweep(num_ranks=4), 1), by_hand]
    check_rows(merged, "merged")
    moved = [Row("all_gather", name, "now", bytes=ends, ranks=(2, 2), nodes=(1, 1))
             for name, ends in (("ring", (0, 99)), ("bruck", (100, None)))]
    assert merge(tuned_rows(sweep(num_ranks=2), 1), moved) == moved, "old ranges that overlap the new ones go too"
    everything = Row("all_gather", "ring", "all")
    assert merge(old, [everything]) == [everything]
