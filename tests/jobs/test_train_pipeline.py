"""`hpctrain train` with a pipeline: the curve of one process, on any layout, through a stop and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.plan.pipeline.trace import from_chrome
from tests.jobs.jobs import mpirun, python
from tests.jobs.training import ONE_THREAD, lines, losses, prepare, reaches, write_config

pytest.importorskip("torch")

STEPS = 50
PIPELINE = """
[mesh]
pipeline = 2
[pipeline]
schedule = "1f1b"
layers = "time"
"""
WHOLE = ["--set", "mesh.pipeline=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the run of one process in float64, the truth, as runs/whole."""
    folder = prepare(tmp_path_factory.mktemp("pipeline"))
    whole = python([*start(folder), *WHOLE, "--set", "run.name=whole"], folder, environ=ONE_THREAD).finish()
    assert whole.code == 0 and "[pipeline] has no say" in whole.stdout, whole.text
    return folder


def start(folder: Path) -> list[str]:
    train = write_config(folder, steps=STEPS, more=PIPELINE)
    return [*train, "--set", "run.dtype=float64", "--set", "batch.accumulation=3", "--set", "log.evaluate_every=20",
            "--set", "run.progress_thread=false"]


def compare(folder: Path, name: str) -> None:
    """All that the runs wrote is equal: losses and norms of each step, validation, tokens, the text of the model."""
    expected, found = lines(folder, "whole"), lines(folder, name)
    assert list(losses(folder, name)) == list(range(1, STEPS + 1))
    by_step = {(line["step"], "loss" in line): line for line in found}
    for truth in expected:
        line = by_step[truth["step"], "loss" in truth]
        for key in set(truth) - {"seconds", "step_seconds"}:
            assert line[key] == pytest.approx(truth[key], rel=1e-8), (key, line)
    sample, whole = ((folder / "runs" / run / "sample.txt").read_bytes() for run in (name, "whole"))
    assert sample == whole


def test_two_ranks_and_a_trace(folder):
    train = [*start(folder), "--set", "run.name=two", "--set", "pipeline.schedule=zb-h1"]
    trace = ["--set", "pipeline.trace=runs/two/step.json", "--set", "pipeline.trace_step=7"]
    job = mpirun(2, [*train, *trace], folder, environ=ONE_THREAD).finish()
    assert job.code == 0, job.text
    assert "mesh pipeline 2 x data 1; zb-h1 with 3 micro-batches, bubble 11.1 % of the" in job.stdout, job.text
    compare(folder, "two")
    summary = json.loads((folder / "runs/two/summary.json").read_text())
    whole = json.loads((folder / "runs/whole/summary.json").read_text())
    assert summary["parameters"] == whole["parameters"] and summary["tokens"] == whole["tokens"]
    assert summary["ranks"] == 2 and summary["tokens_per_second"] > 0
    assert "+0.0 %" in (folder / "runs/two/memory.txt").read_text()
    runs = from_chrome((folder / "runs/two/step.json").read_text())
    assert list(runs) == ["planned zb-h1", "real zb-h1"]
    actions = [sorted((span.rank, str(span.action)) for span in spans) for spans in runs.values()]
    assert actions[0] == actions[1] and len(actions[0]) == 18  # 2 ranks, 3 micro-batches, F I W
    planned, real = (max(span.stop for span in spans) for spans in runs.values())
    assert planned > 0 and 0 < real < 60  # seconds, both


def test_stopped_on_four_ranks_and_resumed_without_a_pipeline_and_on_another(folder):
    train = [*start(folder), "--set", "run.name=moved"]
    stop = mpirun(4, [*train, "--set", "pipeline.layers=[1,3]", "--set", "zero.stage=1"], folder, environ=ONE_THREAD)
    stop.wait_for(lambda: "mesh pipeline 2 x data 2" in stop.stdout())
    asked = stop.ranks()[3]
    stop.wait_for(lambda: reaches(folder, "moved", 3))
    asked.terminate()
    stopped = stop.finish()
    assert stopped.code == 0 and "asked to stop" in stopped.stdout, stopped.text
    steps = json.loads((folder / "runs/moved/summary.json").read_text())["steps"]
    assert 3 <= steps < 45
    alone = python([*train, *WHOLE, "--resume", "auto", "--set", "run.steps=45", "--set", f"schedule.total={STEPS}"],
                   folder, environ=ONE_THREAD).finish()
    assert alone.code == 0 and f"resumed at step {steps} " in alone.stdout, alone.text
    other = ["--set", "pipeline.schedule=interleaved", "--set", "pipeline.chunks=2", "--set", "pipeline.layers=uniform"]
    last = mpirun(2, [*train, *other, "--resume", "auto"], folder, environ=ONE_THREAD).finish()
    assert last.code == 0 and "resumed at step 45 " in last.stdout, last.text
    compare(folder, "moved")


def test_the_numpy_network_in_a_pipeline(folder):
    train = [*start(folder), "--set", "model.kind=mlp", "--set", "run.steps=6"]
    whole = python([*train, *WHOLE, "--set", "run.name=mlp-whole"], folder).finish()
    assert whole.code == 0, whole.text
    cut = ["--set", "mesh.pipeline=3", "--set", "pipeline.schedule=zb-auto", "--set", "run.name=mlp"]
    job = mpirun(3, [*train, *cut], folder).finish()
    assert job.code == 0, job.text
    expected = losses(folder, "mlp-whole")
    assert len(expected) == 6 and losses(folder, "mlp") == pytest.approx(expected, rel=1e-8)


def test_what_does_not_fit_is_one_message(folder):
    train = [*start(folder), "--set", "run.name=never", "--set", "pipeline.layers=[2,3]"]
    job = mpirun(2, train, folder, environ=ONE_THREAD).finish()
    assert job.code == 2, job.text
    assert job.stderr.count("hpctrain: error:") == 1 and "add up to 4, the layers of the model" in job.stderr, job.text
    assert "Traceback" not in job.stderr and not (folder / "runs/never/metrics.jsonl").exists(), job.text
