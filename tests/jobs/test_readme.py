"""What README and scripts promise runs as written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.jobs import ROOT, mpirun

README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)

#: What the reader has: a model and a dataset.
YOURS = """
import torch
dataset = [(torch.randn(3), torch.tensor(i % 2)) for i in range(100)]
MyModel = lambda: torch.nn.Linear(3, 2)
def make_batch(dataset, ids):
    x, y = zip(*(dataset[i] for i in ids))
    return torch.stack(x), torch.stack(y)
"""
ARRAYS = """
import numpy as np
x, risky = np.ones(7), int
{code}
assert full.tolist() == [2.0] * 7 and len(part) in (3, 4)
print("fine")
"""


def test_your_own_model(script: Callable[[str], str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = README[0].replace("update % 500", "update % 5")
    job = mpirun(2, [script(YOURS + code + "\nprint(result.update, flush=True)\n")], tmp_path).finish()
    assert job.code == 0 and job.stdout.split() == ["16", "16"], job.text
    assert (tmp_path / "runs/mine/latest").read_text() == "step-0000000015\n"


def test_only_the_arrays(script: Callable[[str], str], tmp_path: Path) -> None:
    job = mpirun(2, [script(ARRAYS.format(code=README[1]))], tmp_path).finish()
    assert job.code == 0 and job.stdout.split() == ["fine", "fine"], job.text


def test_the_script_goes_on_where_it_stopped_on_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = str(ROOT / "scripts/bring_your_own_model.py")
    first = mpirun(2, [program, "out", "150"], tmp_path).finish()
    assert first.code == 0 and "update 150: loss" in first.stdout, first.text
    second = mpirun(3, [program, "out", "200"], tmp_path).finish()
    assert second.code == 0, second.text
    assert "update 100" not in second.stdout and "update 200: loss" in second.stdout, second.text
