"""A small text, a small config, and what a run of `hpctrain train` left behind: for tests that type commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.jobs.jobs import python

__all__ = ["HPCTRAIN", "ONE_THREAD", "lines", "losses", "prepare", "reaches", "write_config"]

CONFIG = """
[run]
name = "tiny"
steps = {steps}
[model]
kind = "{kind}"
context = 16
width = 16
layers = 2
heads = 2
[data]
store = "text.h5"
length = 16
validation_samples = 16
tail = "keep"
[batch]
global = 12
[optimizer]
lr = 1e-2
[schedule]
warmup = 2
[checkpoint]
every = 20
[log]
every = 50
evaluate_every = 40
sample_bytes = 8
"""
HPCTRAIN = ["-m", "hpctrain"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # tensors this small do not want two


def prepare(folder: Path) -> Path:
    """Puts text.h5 into the folder."""
    words = random.Random(0).choices(["tree ", "leaf ", "root ", "the ", "of ", "\n"], k=1500)
    (folder / "text.txt").write_text("".join(words))
    job = python([*HPCTRAIN, "data", "prepare", "--out", "text.h5", "text.txt", "--split", "tail",
                  "--validation-percent", "20"], folder).finish()
    assert job.code == 0 and "train tokens" in job.stdout, job.text
    return folder


def write_config(folder: Path, kind: str = "gpt", steps: int = 140, more: str = "") -> list[str]:
    """Puts c.toml into the folder; gives the words of the command that trains it."""
    (folder / "c.toml").write_text(CONFIG.format(kind=kind, steps=steps) + more)
    return [*HPCTRAIN, "train", "c.toml"]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    path = folder / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path, name: str) -> dict[int, float]:
    """Its losses by step."""
    return {line["step"]: line["loss"] for line in lines(folder, name) if "loss" in line}


def reaches(folder: Path, name: str, step: int) -> bool:
    """Whether the run's metrics have come to `step`; a last line that is being written does not count yet."""
    path = folder / "runs" / name / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return any(json.loads(line)["step"] >= step for line in whole)
