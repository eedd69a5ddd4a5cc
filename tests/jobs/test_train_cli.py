"""`hpctrain` as a user types it: train, crash, stop, resume on other numbers of ranks, plan, prepare, wrong words."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.jobs.jobs import mpirun, python
from tests.jobs.training import HPCTRAIN, ONE_THREAD, lines, losses, prepare, reaches, write_config


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path)


def test_spread_over_ranks_in_half_precision_and_resumed_at_another_stage(folder):
    pytest.importorskip("torch")
    train = [*write_config(folder, steps=40), "--set", "precision.compute=bfloat16", "--set", "zero.stage=3"]
    spread = ["--set", "zero.share=none", "--set", "zero.threshold=0", "--set", "run.steps=20"]
    first = mpirun(2, [*train, *spread], folder, environ=ONE_THREAD).finish()
    assert first.code == 0, first.text
    assert (folder / "runs/tiny/sample.txt").exists()  # the model ran on one rank, outside of the trainer
    later = mpirun(3, [*train, "--resume", "auto"], folder, environ=ONE_THREAD).finish()
    assert later.code == 0 and "resumed at step 20 " in later.stdout, later.text
    found = losses(folder, "tiny")
    assert list(found) == list(range(1, 41)) and found[40] < 0.8 * found[1]


def test_killed_stopped_and_resumed_on_2_3_1_ranks_is_the_unbroken_run(folder):
    pytest.importorskip("torch")
    # In float64, rounding stays far below what a sample lost or seen twice would do, over all 140 steps.
    train = [*write_config(folder), "--set", "run.dtype=float64"]
    whole = python([*train, "--set", "run.name=whole"], folder, environ=ONE_THREAD).finish()
    assert whole.code == 0, whole.text

    crash = mpirun(2, train, folder, environ=ONE_THREAD)
    crash.wait_for(lambda: reaches(folder, "tiny", 1))
    victim = crash.ranks()[1]
    crash.wait_for(lambda: reaches(folder, "tiny", 30))
    victim.send_signal(signal.SIGKILL)
    assert crash.finish().code != 0
    reached = max(losses(folder, "tiny"))

    stop = mpirun(3, [*train, "--resume", "auto"], folder, environ=ONE_THREAD)
    stop.wait_for(lambda: "resumed at step" in stop.stdout())
    asked = stop.ranks()[2]
    stop.wait_for(lambda: reaches(folder, "tiny", min(reached + 10, 120)))
    asked.send_signal(signal.SIGTERM)
    stopped = stop.finish()
    assert stopped.code == 0 and "asked to stop" in stopped.stdout, stopped.text
    assert "--resume auto" in stopped.stdout
    summary = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert not summary["finished"] and summary["ranks"] == 3

    assert re.search(r"^together .* \+0\.0 %$", (folder / "runs/tiny/memory.txt").read_text(), flags=re.MULTILINE)

    last = python([*train, "--resume", "auto"], folder, environ=ONE_THREAD).finish()
    assert last.code == 0 and f"resumed at step {summary['steps']} " in last.stdout, last.text
    expected, seen = losses(folder, "whole"), [line["step"] for line in lines(folder, "tiny") if "loss" in line]
    assert seen == list(range(1, 141)) == list(expected)  # each step once
    for step, loss in losses(folder, "tiny").items():
        assert loss == pytest.approx(expected[step], rel=1e-8), step
    samples = [[line["samples"] for line in lines(folder, name) if "loss" in line] for name in ("whole", "tiny")]
    assert samples[0] == samples[1]
    summary = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 140 and summary["ranks"] == 1
    assert 0 < summary["val_loss"] < summary["bigram_entropy"] * 1.5
    assert summary["seconds"] > 0 and summary["tokens_per_second"] > 0
    assert (folder / "runs/tiny/sample.txt").exists()
    assert (folder / "runs/tiny/curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_fresh_run_does_not_mix_with_an_older_one(folder):
    train = write_config(folder, kind="mlp", steps=20)
    first = python(train, folder).finish()
    assert first.code == 0 and "asked to stop" not in first.stdout, first.text
    second = python(train, folder).finish()
    assert second.code == 2 and "--resume auto" in second.stderr and "--restart" in second.stderr, second.text
    third = python([*train, "--restart"], folder).finish()
    assert third.code == 0 and list(losses(folder, "tiny")) == list(range(1, 21)), third.text
    text = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(text + text)
    python([*HPCTRAIN, "data", "prepare", "--out", "text.h5", "text.txt", "--split", "tail"], folder).finish()
    other = python([*train, "--resume", "auto", "--set", "run.steps=30"], folder).finish()
    assert other.code == 2 and "place in the data" in other.stderr, other.text


def test_numpy_model_trains_without_torch(folder, script):
    write_config(folder, kind="mlp", steps=60)
    program = script("""
        import sys
        sys.modules['torch'] = None
        from hpctrain.cli.main import app
        app(['train', 'c.toml', '--set', 'optimizer.kind=adamw'])
    """)
    job = mpirun(2, [program], folder).finish()
    assert job.code == 0, job.text
    values = losses(folder, "tiny")
    assert values[60] < 0.7 * values[1]
    assert job.stdout.count("validation loss") == 3  # step 40, step 60, and the last word


def test_wrong_words_are_one_message_on_all_ranks(folder):
    train = write_config(folder)
    for setting, words in [("run.step=3", "did you mean 'steps'?"), ("batch.global=13", "nearest legal"),
                           ("data.store=none.h5", "hpctrain data prepare")]:
        job = mpirun(2, [*train, "--set", setting], folder).finish()
        assert job.code == 2, job.text
        assert job.stderr.count("hpctrain: error:") == 1 and words in job.stderr, job.text
        assert "Traceback" not in job.stderr, job.text


def test_plan_and_help_load_neither_torch_nor_mpi(folder, script):
    write_config(folder)
    program = script("""
        import sys
        from hpctrain.cli.main import app
        try:
            app(sys.argv[1:])
        finally:
            print('loaded', [m for m in ('torch', 'mpi4py', 'cupy') if m in sys.modules])
    """)
    shown = python([program, "plan", "c.toml", "--ranks", "3"], folder).finish()
    assert shown.code == 0 and "loaded []" in shown.stdout, shown.text
    for words in ("12 = 4 x 1 x 3", "data 3", "steps per epoch", "moments"):
        assert words in shown.stdout, shown.text
    refused = python([program, "plan", "c.toml", "--ranks", "5"], folder).finish()
    assert refused.code == 2 and "12 != micro x 1 x 5" in refused.stderr and "10 or 15" in refused.stderr, refused.text
    assert "Traceback" not in refused.stderr
    for arguments, words in [(["--help"], "ckpt"), (["train", "--help"], "--resume"), (["train", "--help-config"],
                             "[schedule]"), (["--version"], "hpctrain ")]:
        job = python([program, *arguments], folder).finish()
        assert job.code == 0 and words in job.stdout and "loaded []" in job.stdout, job.text
