"""Every legal call gets an algorithm that exists, by the first row that fits; bad tables are refused by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.collectives.choice_defaults import SHIPPED
from hpctrain.collectives.choice_file import format_rows, parse_rows
from hpctrain.collectives.choice_row import ANY, DTYPE_GROUPS, REDUCING, Row, check_rows
from hpctrain.collectives.choose import Chooser
from hpctrain.dtypes import DTYPES
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.algorithms import ALGORITHMS, make_plan

CALLS = st.tuples(st.sampled_from(sorted(ALGORITHMS)), st.integers(0, 2**40), st.integers(1, 100_000),
                  st.integers(1, 100_000), st.sampled_from(sorted(DTYPES))).filter(lambda call: call[3] <= call[2])


def ranges(most=9):
    return st.tuples(st.integers(0, most), st.none() | st.integers(0, most)).filter(
        lambda ends: ends[1] is None or ends[0] <= ends[1])


ROWS = st.sampled_from(sorted(ALGORITHMS)).flatmap(lambda operation: st.builds(
    Row, st.just(operation), st.sampled_from(sorted(ALGORITHMS[operation])),
    st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc"])),
    ranges(), ranges(), ranges(), st.sampled_from([*DTYPE_GROUPS, *DTYPES])))


@given(CALLS)
def test_every_call_gets_an_algorithm_that_exists(call):
    choice = Chooser().choose(*call)
    assert choice.operation == call[0] and choice.algorithm in ALGORITHMS[call[0]]
    assert str(call[1]) in choice.reason and "the shipped table" in choice.reason
    assert Chooser().choose(*call) == choice, "ranks that ask alike choose alike"


@given(st.lists(ROWS, max_size=6), CALLS)
def test_a_table_of_a_site_leaves_no_gaps(rows, call):
    try:
        chooser = Chooser(rows)
    except ConfigError:
        return  # a row that can never be reached, or two levels on one node
    fitting = [row for row in rows if row.operation == call[0] and row.fits(*call[1:])]
    expected = fitting[0].algorithm if fitting else Chooser().choose(*call).algorithm
    assert chooser.choose(*call).algorithm == expected


def test_the_shipped_table_is_whole():
    check_rows(SHIPPED, "shipped")  # no unknown word, no row behind one that takes all its calls
    for operation in ALGORITHMS:
        for dtype in DTYPES:
            last = [row for row in SHIPPED if row.operation == operation and dtype in row.dtype_names()][-1]
            assert (last.bytes, last.ranks, last.nodes) == (ANY, ANY, ANY), (operation, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(st.sampled_from(REDUCING), st.integers(2**20, 2**33), st.integers(1, 64))
def test_large_half_sums_travel_as_they_are(dtype, operation, num_bytes, num_ranks):
    algorithm = Chooser().choose(operation, num_bytes, num_ranks, 1, dtype).algorithm
    if operation != "reduce" or num_ranks <= 4:
        assert make_plan(operation, algorithm, num_ranks, num_ranks).direct, "partial sums would be float32 on the wire"


def test_ends_of_ranges_are_included():
    row = Row("all_reduce", "ring", "", bytes=(10, 20), ranks=(2, None), nodes=(1, 1), dtypes="half")
    assert row.fits(10, 2, 1, "float16") and row.fits(20, 999, 1, "bfloat16")
    for call in ((9, 2, 1, "float16"), (21, 2, 1, "float16"), (10, 1, 1, "float16"), (10, 2, 2, "float16"),
                 (10, 2, 1, "float32")):
        assert not row.fits(*call), call


@given(ROWS, ROWS, st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.sampled_from(sorted(DTYPES)))
def test_a_row_that_covers_another_fits_all_its_calls(row, other, num_bytes, num_ranks, num_nodes, dtype):
    call = (num_bytes, num_ranks, num_nodes, dtype)
    if row.covers(other) and other.fits(*call):
        assert row.fits(*call) and row.operation == other.operation
    assert row.covers(row)


@given(st.lists(ROWS, max_size=5))
def test_a_file_brings_back_its_rows(rows):
    assert parse_rows(format_rows(rows, "a heading\nof two lines"), "file") == rows


def test_a_file_decides_and_says_so(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('[[row]]\noperation = "broadcast"\nbytes = [0, 99]\nranks = [2, 4]\nalgorithm = "naive"\n'
                    'reason = "measured"\n')
    chooser = Chooser.load(path)
    choice = chooser.choose("broadcast", 99, 4, 1, "int8")
    assert choice.algorithm == "naive" and "measured" in choice.reason and f"{path}, row 1" in choice.reason
    assert "99 bytes of int8, 4 ranks on 1 node" in choice.reason
    assert "the shipped table" in chooser.choose("broadcast", 100, 4, 1, "int8").reason


GOOD = 'operation = "all_gather"\nalgorithm = "ring"\n'
BAD = {
    "nonsense": ["is not a TOML file"],
    "rows = 1": ["'rows' is unknown", "[[row]]"],
    "[row]\n" + GOOD: ["[[row]]"],
    "[[row]]\n" + GOOD + "[[row]]\nalgorithm = 'ring'": ["row 2", "operation is missing"],
    "[[row]]\noperation = 'all_reduce'": ["row 1", "algorithm is missing"],
    "[[row]]\noperation = 'allreduce'\nalgorithm = 'ring'": ["row 1", "'allreduce'", "did you mean 'all_reduce'"],
    "[[row]]\noperation = 'all_to_all'\nalgorithm = 'ring'": ["row 1", "algorithm = 'ring'", "'pairwise'"],
    "[[row]]\n" + GOOD + "size = [0, 1]": ["row 1", "'size' is unknown", "'bytes'"],
    "[[row]]\n" + GOOD + "bytes = [5, 4]": ["row 1", "bytes = [5, 4]", "low <= high"],
    "[[row]]\n" + GOOD + "bytes = [-1]": ["row 1", "bytes"],
    "[[row]]\n" + GOOD + "ranks = 2": ["row 1: ranks = 2", "[low, high]"],
    "[[row]]\n" + GOOD + "nodes = [1.5]": ["row 1: nodes = [1.5]", "whole numbers"],
    "[[row]]\n" + GOOD + "nodes = [true]": ["row 1: nodes = [True]", "whole numbers"],
    "[[row]]\n" + GOOD + "ranks = [1, 2, 3]": ["row 1: ranks = [1, 2, 3]"],
    "[[row]]\noperation = 'all_reduce'\nalgorithm = 'two-level'": ["row 1", "'two-level'", "nodes = [2]"],
    "[[row]]\n" + GOOD + "dtypes = 'float31'": ["row 1", "'float31'", "'half'", "'float32'"],
    "[[row]]\n" + GOOD + "reason = 3": ["row 1: reason = 3", "string"],
    "[[row]]\n" + GOOD + "[[row]]\n" + GOOD + "bytes = [0, 5]": ["row 2 can never be reached: row 1"],
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_refused_by_row(text):
    with pytest.raises(ConfigError) as caught:
        Chooser.parse(text, source="site.toml")
    for part in ("site.toml", *BAD[text]):
        assert part in str(caught.value), str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*nothing.toml.*No such file"):
        Chooser.load(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a TOML file"):
        Chooser.load(tmp_path / "binary.toml")


def test_unknown_words_of_a_call():
    with pytest.raises(UnsupportedError, match="'gather_all' is not a collective; legal are .*'all_gather'"):
        Chooser().choose("gather_all", 1, 1, 1, "float32")
    with pytest.raises(UnsupportedError, match="'float8'"):
        Chooser().choose("all_reduce", 1, 1, 1, "float8")
