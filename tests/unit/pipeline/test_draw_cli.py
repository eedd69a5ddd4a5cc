"""`hpctrain draw` and the pipeline table of `hpctrain plan`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import _commands
from hpctrain.plan.pipeline.classic import one_f_one_b
from hpctrain.plan.pipeline.simulate import simulate
from hpctrain.plan.pipeline.text import plan_to_text
from hpctrain.plan.pipeline.trace import from_chrome


def run(*words):
    result = CliRunner().invoke(_commands, list(map(str, words)))
    return result.exit_code, result.output


def test_text():
    code, output = run("draw", "1f1b", "--ranks", 2, "--micro-batches", 3)
    assert code == 0
    assert output.splitlines()[1:] == [
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --  stash 2, idle 3",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .   stash 1, idle 0",
        "proved: 6 messages, at most 1 under way on a channel",
    ]


@pytest.mark.parametrize("words, makespan", [
    (["interleaved", "--chunks", 2], "28.5"), (["zb-h1"], "27"), (["zb-h1", "--times", "1,0.98,0.5"], "24.28"),
    (["dualpipe", "--ranks", 8, "--micro-batches", 20, "--paired", 1], "66"), (["zb-auto", "--limit", 1], "72"),
    (["1f1b", "--ranks", 2, "--micro-batches", 1, "--message", 2], "10"),
    (["gpipe", "--ranks", 2, "--micro-batches", 3, "--times", "1,2,0", "--times", "4,3,1"], "27"),
    (["zb-auto", "--ranks", 2, "--micro-batches", 1, "--times", "1,2,3", "--times", "4,5,6"], "16"),
])
def test_makespans(words, makespan):
    code, output = run("draw", *words)
    assert code == 0
    assert f"makespan {makespan}, " in output.splitlines()[0]


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    code, _ = run("draw", "1f1b", "--ranks", 2, "--png", tmp_path / "new" / "a.png", "--trace", tmp_path / "a.json")
    assert code == 0
    assert (tmp_path / "new" / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    spans = simulate(one_f_one_b(2, 8)).spans
    assert from_chrome((tmp_path / "a.json").read_text()) == {"planned 1f1b": spans[0] + spans[1]}
    assert json.loads((tmp_path / "a.json").read_text())["displayTimeUnit"] == "ms"


def test_a_file_with_a_schedule(tmp_path):
    code, output = run("draw", "1f1b", "--ranks", 2, "--micro-batches", 2, "--actions")
    assert (code, output) == (0, plan_to_text(one_f_one_b(2, 2)))
    path = tmp_path / "mine.txt"
    path.write_text(output.replace("1f1b", "mine"))
    assert run("draw", path)[1].startswith("mine, 2 ranks, 2 micro-batches: makespan 9")
    assert run("draw", path, "--messages")[1].splitlines()[0] == "rank 0: F0 SA0 F1 SA1 RG0 B0 RG1 B1* R U"
    path.write_text(output.replace("F0 B0 F1", "F1 B0 F0"))
    code, output = run("draw", path)
    assert (code, "rank 1, slot 1, 1B0: stage 1 has not run 1F0 yet" in output) == (2, True)


@pytest.mark.parametrize("words, complaint", [
    (["1f1c"], "did you mean '1f1b'"), (["1f1b", "--chunks", 2], "takes no chunks"),
    (["1f1b", "--times", "1,2"], "three numbers"), (["1f1b", "--times", "1,1,-1"], "three numbers"),
    (["1f1b", "--column", 0], "column = 0.0 must be above 0"),
    (["1f1b", "--times", "1,1,1", "--times", "1,1,1"], "times for 2 stages, but 1f1b has 4"),
    (["README.md", "--chunks", 2], "is a file, which says everything; leave chunks out"),
])
def test_refused(words, complaint):
    code, output = run("draw", *words)
    assert code == 2
    assert complaint in output


def test_plan_shows_pipelines_where_the_mesh_has_one(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[run]\nsteps = 1\n[model]\nkind = "mlp"\n[batch]\nmicro = 1\naccumulation = 8\n')
    assert "pipeline schedules" not in run("plan", path)[1]
    path.write_text(path.read_text() + "[mesh]\npipeline = 4\n")
    code, output = run("plan", path)
    assert code == 0
    assert "4 ranks, 8 micro-batches, as part of the ideal time" in output
    assert "37.5 %, a rank holds up to 4 micro-batches" in output
    path.write_text(path.read_text().replace("accumulation = 8", "accumulation = 8000"))
    assert "hpctrain draw" in run("plan", path)[1]
