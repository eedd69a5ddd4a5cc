"""From samples of seconds to figures: medians, bus bandwidth, rows for JSON. Pure.

Owns the definitions. Bus bandwidth is that of nccl-tests: bytes of the array over time, times a factor that makes it
independent of the number of ranks, so that it compares with the speed of one rank's link or memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Measured", "bus_factor", "ratios", "row", "rows_of", "shown_bytes"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One operation at one size: seconds a call of each contender, one a round, the slowest rank counting.

    `num_bytes` is of the whole array, as in `collectives.choose`; `copy` is the seconds in which one rank copies that
    many bytes while all others do the same. `native` names the contender that the others are compared with, if any.
    `refused` holds those that do not offer the operation on the dtype, with their words.
    """

    operation: str
    dtype: str
    num_bytes: int
    num_ranks: int
    times: Mapping[str, Sequence[float]]
    copy: Sequence[float]
    native: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def work(self) -> str:
        """The name of the work in rows and tables."""
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}"
        return f"{self.operation} {self.dtype} {shown_bytes(self.num_bytes)}, {ranks}"

    def bus_bandwidth(self, seconds: float) -> float:
        """Bytes a second."""
        return bus_factor(self.operation, self.num_ranks) * self.num_bytes / seconds


def bus_factor(operation: str, num_ranks: int) -> float:
    """What nccl-tests multiplies size / time with: the share of the array that passes each rank's link.

    Of a message there and back, both ways count.
    """
    part = (num_ranks - 1) / num_ranks
    factors = {"all_reduce": 2 * part, "broadcast": 1.0, "reduce": 1.0, "send_recv": 2.0 * (num_ranks > 1)}
    return factors.get(operation, part)


def row(work: str, contender: str, unit: str, samples: Iterable[float]) -> Row:
    """One row {work, contender, unit, median, low, high, runs}; low and high are the quartiles."""
    values = sorted(samples)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"work": work, "contender": contender, "unit": unit, "median": round(median, 4), "low": round(low, 4),
            "high": round(high, 4), "runs": len(values)}


def ratios(mine: Sequence[float], other: Sequence[float]) -> list[float]:
    """mine / other within each round: what the machine does to one round, it does to both."""
    return [a / b for a, b in zip(mine, other, strict=True)]


def rows_of(measured: Measured) -> list[Row]:
    """Time (us), bus bandwidth (GB/s) and, where MPI's own call took part, the ratio to it, of each contender."""
    rows = []
    for contender, times in measured.times.items():
        rows.append(row(measured.work, contender, "us", (1e6 * t for t in times)))
        bandwidth = [measured.bus_bandwidth(t) / 1e9 for t in times]
        rows.append(row(measured.work, contender, "GB/s bus bandwidth", bandwidth))
        if measured.native not in (None, contender):
            rows.append(row(measured.work, contender, f"of {measured.native}'s time",
                            ratios(times, measured.times[measured.native])))
    rows.append(row(measured.work, "memory copy", "GB/s", (measured.num_bytes / t / 1e9 for t in measured.copy)))
    return rows


def shown_bytes(num_bytes: int) -> str:
    """4096 as `4 KiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"
