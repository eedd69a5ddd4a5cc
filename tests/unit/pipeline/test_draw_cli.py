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


GPT = """
[run]
steps = 1
[model]
context = 16
width = 16
layers = 3
heads = 2
[mesh]
pipeline = 2
[pipeline]
layers = [2, 3]
[batch]
micro = 2
accumulation = 4
"""


def cells(output, first):
    """The cells of each row of the table in `output` whose first cell is `first`."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return [row for row in rows if row and row[0].startswith(first)]


def test_plan_shows_stages_grid_and_files(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.toml"
    path.write_text(GPT)
    code, output = run("plan", path, "--png", tmp_path / "a.png", "--trace", tmp_path / "new" / "a.json")
    assert code == 0, output
    block, ends = 12 * 16 * 16 + 13 * 16, 256 * 16
    shown = [row[:5] for row in cells(output, "") if len(row) == 6]
    assert shown == [["0", "0", "2: embedding .. block 0", f"{ends + block:,}", "2"],
                     ["1", "1", "3: block 1 .. head", f"{ends + 2 * block + 32:,}", "1"]]
    assert "1f1b, 2 ranks, 4 micro-batches: makespan 15, bubble 3 (25.0 % of the ideal time" in output
    assert "rank 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --  stash 2, idle 3" in output.splitlines()
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    spans = simulate(one_f_one_b(2, 4)).spans
    assert from_chrome((tmp_path / "new" / "a.json").read_text()) == {"planned 1f1b": spans[0] + spans[1]}


def test_plan_counts_the_memory_of_each_place(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(GPT)
    output = run("plan", path)[1]
    block, ends, kib = 12 * 16 * 16 + 13 * 16, 256 * 16, 1024
    (parameters,), (moments,) = cells(output, "parameters"), cells(output, "moments")
    each = [4 * count / kib for count in (ends + block, ends + 2 * block + 32)]
    assert parameters[1:] == [f"{size:.2f} KiB" for size in each] + ["rank"]
    assert moments[1:] == [f"{2 * size:.2f} KiB" for size in each] + ["rank"]
    (tied,), (kept,) = cells(output, "sums of tied"), cells(output, "activations")
    assert tied[1:3] == ["16.00 KiB"] * 2
    rotary, angles = 19 * 16 + 4 + 2, 16 * 8
    layer, head = 2 * 16 * rotary + angles, 2 * 16 * (2 * 16 + 2 + 256)
    assert kept[1:3] == [f"{4 * size / kib:.2f} KiB" for size in (2 * layer, 2 * layer + head)]
    spread = run("plan", path, "--ranks", 4, "--set", "zero.stage=1")[1]  # two pipelines share the moments
    shares = [float(cell.split()[0]) for cell in cells(spread, "moments")[0][1:3]]
    assert shares == pytest.approx(each, rel=0.01)  # parts begin at round numbers
    table = run("plan", path, "--stages", "--ranks", 4)[1].partition("by zero.stage and ranks")[2]
    assert [row[0] for row in cells(table.partition("└")[0], "")] == ["0", "1"]


def test_plan_counts_two_copies_on_ranks_that_share_their_states(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(GPT.replace("[pipeline]", '[pipeline]\nschedule = "dualpipe"'))
    code, output = run("plan", path)
    assert code == 0, output
    assert [row[:3] for row in cells(output, "") if len(row) == 6] == [
        ["0", "0", "2: embedding .. block 0"], ["1", "1", "3: block 1 .. head"],
        ["2", "1", "2: embedding .. block 0"], ["3", "0", "3: block 1 .. head"]]
    parameters = 3 * (12 * 16 * 16 + 13 * 16) + 2 * 16 + 256 * 16
    (whole,) = cells(output, "parameters")
    assert whole[1:3] == [f"{4 * parameters / 1024:.2f} KiB"] * 2
    (moments,) = cells(run("plan", path, "--set", "zero.stage=1")[1], "moments")
    assert float(moments[1].split()[0]) == pytest.approx(4 * parameters / 1024, rel=0.02)


def test_plan_of_a_long_pipeline_shows_the_extremes(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(GPT.replace("layers = 3", "layers = 6").replace("[2, 3]", "[1, 1, 1, 1, 1, 3]")
                    .replace("pipeline = 2", "pipeline = 6").replace("accumulation = 4", "accumulation = 64"))
    code, output = run("plan", path)
    assert code == 0 and "too wide for a terminal" in output
    assert "most: pipeline 5" in output and "least: pipeline 0" in output


@pytest.mark.parametrize("change, words", [
    ("pipeline.layers=[2, 2]", "must be 2 numbers, one a stage, that add up to 5, the layers of the model: embedding"),
    ("pipeline.layers=[2, 2, 1]", "must be 2 numbers"), ("pipeline.chunks=2", "takes no chunks"),
    ("pipeline.schedule=dualpip", "did you mean 'dualpipe'?"), ("zero.stage=2", "legal are 0 or 1"),
    ("mesh.data=0", None),
])
def test_plan_refuses_what_training_would(tmp_path, change, words):
    path = tmp_path / "a.toml"
    path.write_text(GPT)
    code, output = run("plan", path, "--set", change)
    assert (code, words is None or words in output) == (0 if words is None else 2, True), output


def test_plan_needs_a_pipeline_for_its_picture(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(GPT.replace("pipeline = 2", "pipeline = 1"))
    code, output = run("plan", path, "--png", tmp_path / "a.png")
    assert code == 2 and "mesh.pipeline must be above 1" in output
    path.write_text(GPT.replace("pipeline = 2", "data = 2\npipeline = 2"))
    code, output = run("plan", path)
    assert code == 2 and "legal is pipeline first" in output
