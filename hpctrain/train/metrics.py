"""The metrics of a run: one JSON object a line, one line a step and one a validation.

Owns the file's form and what becomes of it when a run is resumed. Must not know what the numbers mean. Only one rank
holds a `Metrics`.

    {"step": 7, "loss": 2.31, "lr": 0.001, "gradient_norm": 0.8, "tokens": 21504, "seconds": 1.9, ...}
    {"step": 7, "val_loss": 2.35, "val_tokens": 4096}
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

__all__ = ["Metrics", "read_metrics"]


class Metrics:
    """Appends lines to `path`. Lines of steps behind `resumed_step` are cut off first, so no step is there twice."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        kept = [line for line in _lines(path) if line["step"] <= resumed_step] if resumed_step else []
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """One line, handed to the operating system at once. Numbers that are not finite become null, as JSON wants."""
        finite = {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the steps and of the validations that have a finite loss, in order; a cut line is left out."""
    lines = _lines(path)
    steps, validations = ([line for line in lines if line.get(name) is not None] for name in ("loss", "val_loss"))
    return steps, validations


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # a job that was killed while it wrote
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines
