"""docs/memory.md says what is: its bytes per parameter, its rows and its example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.plan.memory import Partition, StateTypes, by_count, bytes_per_parameter

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
TYPES = {
    "float32": StateTypes("float32"),
    "float64": StateTypes("float64"),
    "half; gradients float32 (the default)": StateTypes("bfloat16"),
    "half; `precision.accumulate` half too": StateTypes("float16", accumulate="float16"),
}


def rows(header: str) -> dict[str, list[str]]:
    """The body of the table whose header starts so, by first cell."""
    body = PAGE.partition(f"| {header} |")[2].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in body[:next(i for i, line in enumerate(body) if not line.startswith("|"))]]
    return {line[0]: line[1:] for line in table}


@pytest.mark.parametrize("name", TYPES)
def test_bytes_per_parameter(name: str) -> None:
    table = rows("types")
    assert set(table) == set(TYPES)
    for stage, cell in enumerate(table[name]):
        for n in (1, 2, 3, 64):
            words = re.fullmatch(r"(?:(\d+)(?: \+ |$))?(?:(\d+)/n)?", cell)
            assert words is not None, cell
            whole, divided = (float(x or 0) for x in words.groups())
            found = bytes_per_parameter(TYPES[name], Partition(n, stage))
            assert found == pytest.approx(whole + divided / n, rel=1e-12), (cell, n)


def test_rows() -> None:
    table = rows("row")
    assert {*table} == {row.name for row in by_count(1, StateTypes(), Partition())} - {"gradient copy"}
    types = StateTypes("float16")
    for stage in range(4):
        for row in by_count(2**40, types, Partition(4, stage), largest_unit=1, activations=1):
            if row.name not in table:
                continue
            cell = table[row.name][stage]
            assert (row.num_bytes > 0) == (cell != "-"), (stage, row)
            more = sum(r.num_bytes for r in by_count(2**40, types, Partition(8, stage)) if r.name == row.name)
            if cell.startswith(("all", "own part")) and row.name != "activations":
                assert (more < row.num_bytes) == cell.startswith("own part"), (stage, row)


def test_the_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0] + "\nprint(total(rows))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    windows = 2 * (8 << 20) / 2 * 4  # two buckets of 8 MiB, whose gradients are twice as wide
    assert float(run.stdout) == 18e12 / 1024 + windows
