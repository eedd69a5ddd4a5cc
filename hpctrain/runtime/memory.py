"""The memory report: what was planned next to what is there, for all ranks, and what the operating system says.

Owns the comparison and its table. Must not know who holds which buffer: rows come from `plan.memory`, measured bytes
from whoever holds the buffers, as (row name, bytes).

    memory a rank         planned               measured              difference
    parameters            12.00 MiB             12.00 MiB             0.0 %
    moments               11.98 .. 12.02 MiB    11.98 .. 12.02 MiB    0.0 %
    together              ...
    process               resident 310.20 .. 312.90 MiB, of that shared 24.00 MiB, its share of all 298.01 MiB, ...
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays
from hpctrain.plan.memory import MemoryRow

__all__ = ["Compared", "Process", "compare", "num_bytes", "process", "report"]

Span = tuple[float, float]  # least and most over the ranks

OTHER = "not planned"
TOGETHER = "together"


@dataclass(frozen=True)
class Process:
    """Memory of this process in bytes, as the operating system counts it; -1 where it does not say.

    `resident`: pages in memory. `shared`: those of them that are of files and of memory shared with other processes,
    gradients and parameters in /dev/shm included. `proportional`: resident, each page divided by the number of
    processes that have it: what the ranks of a node use together is the sum of these. `peak`: most that was resident.
    """

    resident: float
    shared: float
    proportional: float
    peak: float


@dataclass(frozen=True)
class Compared:
    """One row over all ranks. `measured` is None where some rank did not measure it.

    `difference` is (measured - planned) / planned of the rank where it is largest, None where nothing was planned.
    """

    name: str
    planned: Span
    measured: Span | None
    difference: float | None


def num_bytes(arrays: Arrays, array: Array) -> int:
    """Bytes of a flat array. Local."""
    return len(arrays.memory(array))


def process() -> Process:
    """This process as it is now. Local."""
    info = psutil.Process().memory_info()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Process(info.rss, getattr(info, "shared", -1), _proportional(Path("/proc/self/smaps_rollup")),
                   max(info.rss, peak))  # the system brings its peak up to date now and then only


def _proportional(rollup: Path) -> float:
    """The Pss line of the kernel's summary of all mappings, or -1."""
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return -1
    return next((1024 * float(line.split()[1]) for line in lines if line.startswith("Pss:")), -1)


def compare(group: Group, planned: Sequence[MemoryRow], measured: Iterable[tuple[str, int]]) -> list[Compared]:
    """The rows of all ranks side by side, the same on every rank. Collective over the group.

    Args:
        group: the ranks that are compared.
        planned: this rank's rows; the same names in the same order on all ranks.
        measured: bytes by row name; several of one row are added, other names go to a row "not planned". A rank that
            owns nothing of a row still names it, with 0 bytes. Rows that nobody names are left out of "together".
    """
    names = [row.name for row in planned]
    found: dict[str, float] = {}
    for name, size in measured:
        key = name if name in names else OTHER
        found[key] = found.get(key, 0) + size
    pairs = [(row.num_bytes, found.get(row.name, -1)) for row in planned] + [(0, found.get(OTHER, 0))]
    known = [(plan, real) for plan, real in pairs if real >= 0]
    pairs.append((sum(plan for plan, _ in known), sum(real for _, real in known)))
    table = np.array([(plan, real, (real - plan) / plan if plan else 0) for plan, real in pairs], dtype=np.float64)
    low, high = (group.all_reduce(table.copy(), operation).tolist() for operation in ("min", "max"))
    rows = []
    for i, name in enumerate([*names, OTHER, TOGETHER]):
        (plan_low, real_low, off_low), (plan_high, real_high, off_high) = low[i], high[i]
        seen = real_low >= 0
        off = max(off_low, off_high, key=abs) if seen and plan_high else None
        rows.append(Compared(name, (plan_low, plan_high), (real_low, real_high) if seen else None, off))
    return rows


def report(group: Group, planned: Sequence[MemoryRow], measured: Iterable[tuple[str, int]]) -> str:
    """The table of `compare`, and the processes' memory, as text, the same on every rank. Collective over the group."""
    rows = compare(group, planned, measured)
    p = process()
    mine = np.array([p.resident, p.shared, p.proportional, p.peak], dtype=np.float64)
    low, high = (group.all_reduce(mine.copy(), operation) for operation in ("min", "max"))
    words = ("resident", "of that shared", "its share of all", "most so far")
    told = [f"{word} {_span((a, b))}" for word, a, b in zip(words, low, high, strict=True) if a >= 0]
    lines = [("memory a rank", "planned", "measured", "difference")]
    for row in rows:
        if row.planned[1] or (row.measured or (0, 0))[1]:
            off = "-" if row.difference is None or row.measured is None else f"{100 * row.difference:+.1f} %"
            lines.append((row.name, _span(row.planned), "-" if row.measured is None else _span(row.measured), off))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "process".ljust(widths[0]) + "  " + ", ".join(told)])


def _span(span: Span) -> str:
    """`12.00 MiB`, or `11.50 .. 12.00 MiB` where ranks differ."""
    low, high = (f"{value / 2**20:,.2f}" for value in span)
    return f"{high} MiB" if low == high else f"{low} .. {high} MiB"
