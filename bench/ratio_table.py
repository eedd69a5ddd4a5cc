"""Markdown tables of what bench/collectives.py measured: hpctrain's time over that of the best of the others.

    python bench/ratio_table.py [build/bench/collectives.json]

The best is the one with the highest ratio among all jobs of a work, so that no two jobs are compared. Letters: o mpi4py
on Open MPI, m mpi4py on MPICH, g torch gloo, d DeepSpeed's shared-memory all-reduce, h Horovod.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LETTERS = {"mpi4py (Open MPI)": "o", "mpi4py (MPICH)": "m", "torch gloo": "g", "DeepSpeed shm": "d", "Horovod": "h"}
FLOOR, OURS = "memory floor", "hpctrain"
SMALL = 4  # KiB: up to here, the time of a call counts and not that of its bytes
FLOOR_FROM = 16 << 10  # KiB: below, arrays stay in cache
WORK = re.compile(r"(\w+)( ordinary)? (\w+) (\d+) KiB, (\d+) ranks \((.*)\)")


class Cell(NamedTuple):
    """One operation at one size."""

    ratios: dict[str, float]  # contender: hpctrain's time over its
    times: dict[str, dict[str, float]]  # library of the job: {contender: us}


def read(rows: Iterable[dict]) -> dict[tuple[int, bool, str], dict[str, dict[int, Cell]]]:
    """{(ranks, ordinary, dtype): {operation: {KiB: cell}}}."""
    tables: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: Cell({}, defaultdict(dict)))))
    for row in rows:
        operation, ordinary, dtype, size, ranks, library = WORK.fullmatch(row["work"]).groups()
        cell = tables[int(ranks), ordinary is not None, dtype][operation][int(size)]
        if row["unit"] == "us":
            cell.times[library][row["contender"]] = row["median"]
        else:
            other = row["contender"].removeprefix(f"{OURS} / ")
            cell.ratios[other] = max(row["median"], cell.ratios.get(other, 0.0))  # the floor: of each job, the worse
    return tables


def shown_ratio(cell: Cell) -> str:
    """`0.52 o`: the highest ratio and whose it is; over 1 in bold."""
    ratios = {name: ratio for name, ratio in cell.ratios.items() if name in LETTERS}
    best = max(ratios, key=ratios.__getitem__)
    text = f"{ratios[best]:.2f}" if ratios[best] < 10 else f"{ratios[best]:.0f}"
    return f"**{text}** {LETTERS[best]}" if ratios[best] > 1 else f"{text} {LETTERS[best]}"


def shown_extra(cell: Cell) -> str:
    """Microseconds that a call takes over mpi4py's own, in each job."""
    found = [(LETTERS[name], times[OURS] - times[name]) for library, times in cell.times.items()
             for name in (f"mpi4py ({library})",) if name in times]
    return ", ".join(f"{extra:+.1f} {letter}" for letter, extra in found)


def table(operations: dict[str, dict[int, Cell]], heading: str) -> list[str]:
    """One table: a column for each size, one for the overhead of a small one, one for the floor of the large."""
    sizes = sorted({size for cells in operations.values() for size in cells})
    large = [size for size in sizes if size >= FLOOR_FROM]
    names = [f"{size >> 10} MiB" if size % 1024 == 0 else f"{size} KiB" for size in sizes]
    small = sizes[0] <= SMALL
    columns = [heading, *names, *[f"us over MPI's own call, {names[0]}"] * small]
    columns += [f"over the floor, {' / '.join(str(size >> 10) for size in large)} MiB"] * bool(large)
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for operation, cells in operations.items():
        row = [operation.replace("_", "-")]
        row += [shown_ratio(cells[size]) if size in cells else "" for size in sizes]
        row += [shown_extra(cells[sizes[0]]) if sizes[0] in cells else ""] * small
        if large:
            row += [" / ".join(f"{cells[size].ratios[FLOOR]:.2f}" if size in cells else "-" for size in large)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main() -> None:
    """Prints all tables of a file."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "build/bench/collectives.json")
    for (ranks, ordinary, dtype), operations in read(json.loads(path.read_text())).items():
        heading = f"{ranks} ranks, {dtype}, {'ordinary buffers' if ordinary else 'buffers from allocate'}"
        print("\n".join(table(operations, heading)) + "\n")


if __name__ == "__main__":
    main()
