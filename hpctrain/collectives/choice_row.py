"""One row of the table of algorithms: which calls it is for, what they get, and why.

Owns the record, its ranges and the check of a list of rows. Must not know where rows come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.collectives.way import NATIVE, SHARED
from hpctrain.dtypes import DTYPES
from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.plan.algorithms import ALGORITHMS

__all__ = ["ACROSS_NODES", "ANY", "DTYPE_GROUPS", "RANGES", "REDUCING", "WAYS", "Range", "Row", "check_rows", "is_half",
           "ways"]

#: Lowest and highest value, both included; None for no upper end.
Range = tuple[int, int | None]

ANY: Range = (0, None)
RANGES = ("bytes", "ranks", "nodes")

#: Operations that add; all others move bytes, whatever their dtype.
REDUCING = ("all_reduce", "reduce", "reduce_scatter")

#: Algorithms that only groups on several nodes can carry out.
ACROSS_NODES = ("two-level",)

#: What there is besides plans, where a transport has it.
WAYS = frozenset({NATIVE, SHARED})


def ways(operation: str) -> list[str]:
    """Everything that may carry out `operation`: its plans' names, the transport's own call, shared memory."""
    return [*ALGORITHMS[operation], *sorted(WAYS)]


def is_half(dtype: str) -> bool:
    """Whether sums of `dtype` are carried in float32: where they are formed, or (partial sums) also on the wire."""
    return DTYPES[dtype].accumulate != dtype


#: Words for several dtypes at once.
DTYPE_GROUPS: dict[str, frozenset[str]] = {
    "any": frozenset(DTYPES),
    "half": frozenset(name for name in DTYPES if is_half(name)),
    "plain": frozenset(name for name in DTYPES if not is_half(name)),
}


@dataclass(frozen=True)
class Row:
    """Calls of `operation` within all ranges get `algorithm`. `dtypes` is a group's name or one dtype's.

    `bytes` is of the whole array, as in `Chooser.choose`; `ranks` and `nodes` are those of the group.
    """

    operation: str
    algorithm: str
    reason: str
    bytes: Range = ANY
    ranks: Range = ANY
    nodes: Range = ANY
    dtypes: str = "any"

    def fits(self, num_bytes: int, num_ranks: int, num_nodes: int, dtype: str) -> bool:
        """Whether the row is for this call (of its operation)."""
        values = ((num_bytes, self.bytes), (num_ranks, self.ranks), (num_nodes, self.nodes))
        return dtype in self.dtype_names() and all(
            low <= value and (high is None or value <= high) for value, (low, high) in values)

    def covers(self, other: Row) -> bool:
        """Whether `other` is never reached behind this row, which takes all its calls wherever they are made."""
        if self.algorithm in WAYS and other.algorithm != self.algorithm:
            return False
        ranges = ((getattr(self, name), getattr(other, name)) for name in RANGES)
        return self.operation == other.operation and other.dtype_names() <= self.dtype_names() and all(
            low <= inner_low and (high is None or (inner_high is not None and inner_high <= high))
            for (low, high), (inner_low, inner_high) in ranges)

    def dtype_names(self) -> frozenset[str]:
        """The dtypes that the row is for."""
        return DTYPE_GROUPS.get(self.dtypes) or frozenset([self.dtypes])


def check_rows(rows: Sequence[Row], source: str) -> None:
    """Refuses rows with unknown words or empty ranges, and rows that an earlier one leaves nothing to.

    Raises:
        ConfigError: names the row (from 1), the value and the legal ones.
    """
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        _check_word(where, "operation", row.operation, ALGORITHMS)
        _check_word(where, "algorithm", row.algorithm, ways(row.operation))
        _check_word(where, "dtypes", row.dtypes, [*DTYPE_GROUPS, *DTYPES])
        for name in RANGES:
            low, high = getattr(row, name)
            if low < 0 or (high is not None and high < low):
                raise ConfigError(f"{where}: {name} = {[low, high]} must be [low] or [low, high] with 0 <= low <= high")
        if row.algorithm in ACROSS_NODES and row.nodes[0] < 2:
            raise ConfigError(f"{where}: algorithm = {row.algorithm!r} needs several nodes; make it nodes = [2]")
        for earlier, other in enumerate(rows[: number - 1], start=1):
            if other.covers(row):
                raise ConfigError(f"{where} can never be reached: row {earlier} already takes all its calls; "
                                  "put it before that row, or take it out")


def _check_word(where: str, name: str, value: str, legal: Iterable[str]) -> None:
    words = list(legal)
    if value not in words:
        raise ConfigError(f"{where}: {name} = {value!r} is unknown{nearest(value, words)}; legal are {choices(words)}")
