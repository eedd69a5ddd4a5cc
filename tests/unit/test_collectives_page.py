"""docs/collectives.md says what the code does: its table of dtypes, its algorithms, its examples."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from hpctrain.dtypes import DTYPES, OPERATIONS
from hpctrain.plan.algorithms import ALGORITHMS

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"


def rows_of(title: str) -> list[list[str]]:
    """The cells of the first table after a title, without its rule."""
    section = PAGE.read_text().split(title, 1)[1].split("\n## ", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_dtypes_and_operations() -> None:
    header, *rows = rows_of("## Which dtype allows which operation")
    assert [cell.strip("`") for cell in header[1:]] == list(OPERATIONS)
    seen = []
    for names, *cells in rows:
        ints = [name for name, row in DTYPES.items() if row.kind == "int"]
        for name in ints if "..." in names else names.split(", "):
            seen.append(name)
            for operation, cell in zip(OPERATIONS, cells, strict=True):
                row = DTYPES[name]
                wide = row.accumulate != name and operation in ("sum", "mean", "prod")
                right = "-" if row.kind not in OPERATIONS[operation] else "float32" if wide else "yes"
                assert cell == right, (name, operation)
    assert sorted(seen) == sorted(DTYPES)


def test_every_algorithm_is_in_the_table() -> None:
    found: dict[str, list[str]] = {}
    operations: list[str] = []
    for operation, algorithm, *_ in rows_of("## Algorithms")[1:]:
        operations = operation.split(", ") if operation else operations
        for name in operations:
            found.setdefault(name, []).append(re.findall("`(.*?)`", algorithm)[0])
    assert {operation: sorted(names) for operation, names in found.items()} == {
        operation: sorted(makers) for operation, makers in ALGORITHMS.items()
    }


def test_the_examples() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 5
    assert failed == 0
