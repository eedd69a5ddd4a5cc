"""`hpctrain bench` on real jobs of tiny sizes: tables, rows, pictures, and a table of algorithms that can be read."""

from __future__ import annotations

import json

import pytest

from hpctrain.bench.contenders import OPERATIONS
from hpctrain.collectives.choose import Chooser
from hpctrain.plan.algorithms import ALGORITHMS
from tests.jobs.jobs import mpirun, python

COLLECTIVES = ["-m", "hpctrain", "bench", "collectives", "--sizes", "1KiB,40000", "--rounds", "3", "--out", "out"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_contender_of_every_operation(tmp_path, num_ranks):
    start = python if num_ranks == 1 else lambda *job: mpirun(num_ranks, *job)
    job = start(COLLECTIVES, tmp_path).finish()
    assert job.code == 0, job.text
    rows = json.loads((tmp_path / "out" / "collectives.json").read_text())
    assert all(list(row) == ["work", "contender", "unit", "median", "low", "high", "runs"] for row in rows)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    for operation in OPERATIONS:
        assert (tmp_path / "out" / f"{operation}-float32.png").read_bytes().startswith(PNG)
        assert f"{operation} of float32, {ranks}" in job.stdout
        for size in ("1 KiB", "40000 B"):
            mine = [row for row in rows if row["work"] == f"{operation} float32 {size}, {ranks}"]
            times = {row["contender"]: row for row in mine if row["unit"] == "us"}
            assert {"chosen", "MPI"} | ({"naive"} & set(ALGORITHMS.get(operation, ()))) <= set(times), (operation, size)
            assert all(row["median"] > 0 and row["runs"] == 3 for row in times.values())
            assert {row["contender"] for row in mine if row["unit"] == "of MPI's time"} == set(times) - {"MPI"}
    assert job.stdout.count("rows in") == 1, "one rank speaks"


def test_half_types_and_one_contender(tmp_path):
    options = ["--operations", "all_reduce", "--dtypes", "bfloat16", "--algorithms", "pairwise,ring,MPI"]
    job = mpirun(2, [*COLLECTIVES, *options], tmp_path).finish()
    assert job.code == 0, job.text
    rows = json.loads((tmp_path / "out" / "collectives.json").read_text())
    found = {row["contender"] for row in rows if row["unit"] == "us"}
    assert found == {"pairwise", "ring"}, "MPI has no bfloat16"


def test_ranks_that_share_a_core_are_told_once(tmp_path, script):
    program = script("""
        import os, runpy, sys
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.argv[0] = "hpctrain"
        runpy.run_module("hpctrain", run_name="__main__")
    """)
    options = ["--operations", "broadcast", "--algorithms", "naive", "--sizes", "64"]
    job = mpirun(2, [program, *COLLECTIVES[2:], *options], tmp_path).finish()
    assert job.code == 0, job.text
    assert job.stderr.count("ranks 0-1 on ") == job.stderr.count("share cores") == 1, job.text


def test_tune_writes_a_table_and_keeps_what_is_there(tmp_path):
    (tmp_path / "site.toml").write_text('[[row]]\noperation = "all_reduce"\nranks = [64]\ndtypes = "plain"\n'
                                        'algorithm = "rabenseifner"\nreason = "by hand"\n')
    tune = ["-m", "hpctrain", "bench", "tune", "--sizes", "1KiB,40000", "--rounds", "3", "--out", "site.toml"]
    for _ in range(2):
        job = mpirun(2, tune, tmp_path).finish()
        assert job.code == 0, job.text
        chooser = Chooser.load(tmp_path / "site.toml")
        for operation in ALGORITHMS:
            choice = chooser.choose(operation, 2000, 2, 1, "float32")
            assert "measured at" in choice.reason and "site.toml, row" in choice.reason
            assert "the shipped table" in chooser.choose(operation, 2000, 3, 1, "float32").reason
        assert "by hand" in chooser.choose("all_reduce", 2000, 64, 1, "float32").reason
    why = ["-m", "hpctrain", "bench", "choose", "broadcast", "2KiB", "--table", "site.toml"]
    answer = python(why, tmp_path).finish()
    assert answer.code == 0 and "measured at" in answer.stdout, answer.text


@pytest.mark.parametrize("arguments, words", [
    (["collectives", "--operations", "allreduce"], "--operations: 'allreduce' is unknown (did you mean 'all_reduce'?)"),
    (["collectives", "--sizes", "4 parsec"], "--sizes: '4 parsec' is not a size"),
    (["tune", "--out", "bad.toml", "--sizes", "64", "--rounds", "1"], "bad.toml, row 1: operation is missing"),
    (["tune", "--out", "new.toml", "--operations", "send_recv"], "'send_recv' has one way only; legal are 'broadcast'"),
    (["choose", "broadcast", "1KiB", "--nodes", "3"], "--nodes 3 is more than --ranks 2"),
])  # fmt: skip
def test_wrong_words_are_said_without_a_traceback(tmp_path, arguments, words):
    (tmp_path / "bad.toml").write_text('[[row]]\nalgorithm = "ring"\n')
    job = python(["-m", "hpctrain", "bench", *arguments], tmp_path).finish()
    assert job.code == 2 and "Traceback" not in job.stderr, job.text
    assert words in job.stderr.replace("\n", " "), job.text


def test_draw_needs_no_mpi(tmp_path):
    blocked = "import sys; sys.modules['mpi4py'] = None; from hpctrain.cli.main import app; app()"
    draw = ["bench", "collectives", "--draw", "--ranks", "3", "--operations", "all_gather", "--algorithms", "ring"]
    job = python(["-c", blocked, *draw], tmp_path).finish()
    assert job.code == 0, job.text
    assert job.stdout.split("\n")[:4] == [
        "ring all_gather, 3 ranks",
        "round   rank 0   rank 1   rank 2",
        "    0   0 > 1    1 > 2    2 > 0",
        "    1   2 > 1    0 > 2    1 > 0",
    ], job.text
    draw[-3:] = ["all_reduce", "--algorithms", "parameter server", "--servers", "2"]
    job = python(["-c", blocked, *draw], tmp_path).finish()
    assert job.code == 0 and job.stdout.split("\n")[2].count("+>") == 4, job.text  # two servers hear of two ranks each
    everything = python(["-c", blocked, "bench", "collectives", "--draw", "--ranks", "5"], tmp_path).finish()
    assert everything.code == 0 and "two-level all_reduce, 5 ranks" in everything.stdout, everything.text


def test_a_job_takes_its_algorithms_from_a_table(tmp_path, script):
    (tmp_path / "table.toml").write_text('[[row]]\noperation = "all_reduce"\nalgorithm = "naive"\nreason = "here"\n')
    program = script("""
        import sys, hpctrain, numpy as np
        context = hpctrain.start(algorithms=sys.argv[1])
        print(context.world.all_reduce(np.ones(3)).tolist(), flush=True)
    """)
    good = mpirun(2, [program, "table.toml"], tmp_path).finish()
    assert good.code == 0 and good.stdout.splitlines() == ["[2.0, 2.0, 2.0]"] * 2, good.text
    bad = mpirun(2, [program, "none.toml"], tmp_path).finish()
    assert bad.code != 0 and "cannot read the table of algorithms 'none.toml'" in bad.stderr, bad.text
