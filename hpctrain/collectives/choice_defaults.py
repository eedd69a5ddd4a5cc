"""The shipped table of algorithms: what to take where nobody has measured.

Owns the rows and their reasons. For each operation and dtype the last row has no limits, so every call fits one. The
sizes at which rows meet come from the costs in `hpctrain.plan.cost` with about 10 us a round and 10 GB/s a rank: a
round costs as much as 100 KB; those for few ranks from measurements on one node. A site whose network differs measures
its own table with `hpctrain bench tune`.
"""

from __future__ import annotations

from hpctrain.collectives.choice_row import Range, Row
from hpctrain.collectives.way import NATIVE, SHARED

__all__ = ["SHIPPED"]

_KIB, _MIB = 1 << 10, 1 << 20


def _up_to(num_bytes: int) -> Range:
    return 0, num_bytes


def _from(number: int) -> Range:
    return number, None


def _ways(operation: str, num_bytes: int) -> tuple[Row, Row]:
    """What serves `operation` wherever a transport has it: its library's own call up to `num_bytes`, then memory."""
    return (Row(operation, NATIVE, "small: one call of the library instead of several messages of ours",
                bytes=_up_to(num_bytes)),
            Row(operation, SHARED, "on one node: no data in messages, and each element is read where it lies"))


SHIPPED: tuple[Row, ...] = (
    *_ways("broadcast", 32 * _KIB),
    Row("broadcast", "binomial tree", "small: lg p rounds, each rank in few of them", bytes=_up_to(64 * _KIB)),
    Row("broadcast", "scatter + all-gather", "medium, many ranks: about twice the bytes, but no rank sends more",
        bytes=_up_to(_MIB), ranks=_from(8)),
    Row("broadcast", "ring", "large: pieces follow each other down a chain, so each rank sends the bytes once"),

    *_ways("scatter", 8 * _KIB),
    Row("scatter", "binomial tree", "small, many ranks: lg p rounds instead of p - 1 messages from one rank",
        bytes=_up_to(64 * _KIB), ranks=_from(8)),
    Row("scatter", "naive", "straight to the owner: no byte is passed on"),

    *_ways("gather", 8 * _KIB),
    Row("gather", "binomial tree", "small, many ranks: lg p rounds instead of p - 1 messages to one rank",
        bytes=_up_to(64 * _KIB), ranks=_from(8)),
    Row("gather", "naive", "straight to the root: no byte is passed on"),

    *_ways("reduce", 32 * _KIB),
    Row("reduce", "naive", "half sums, few ranks: straight to the root, which adds in float32", ranks=(0, 4),
        dtypes="half"),
    Row("reduce", "binomial tree", "small: lg p rounds", bytes=_up_to(64 * _KIB)),
    Row("reduce", "rabenseifner", "large: every rank adds a part"),

    *_ways("all_reduce", 32 * _KIB),
    Row("all_reduce", "naive", "small half sums, few ranks: one round; every rank adds in float32",
        bytes=_up_to(16 * _KIB), ranks=(0, 4), dtypes="half"),
    Row("all_reduce", "recursive doubling", "small half sums: lg p rounds, though in float32 on the wire",
        bytes=_up_to(16 * _KIB), dtypes="half"),
    Row("all_reduce", "pairwise", "half sums: no partial sum travels; the owner adds in float32", dtypes="half"),
    Row("all_reduce", "recursive doubling", "small: lg p rounds", bytes=_up_to(64 * _KIB)),
    Row("all_reduce", "two-level", "several nodes: each node's ranks share the bytes between nodes", nodes=_from(2)),
    Row("all_reduce", "rabenseifner", "medium, four ranks: 4 rounds instead of the ring's 6",
        bytes=_up_to(_MIB), ranks=(4, 4)),
    Row("all_reduce", "rabenseifner", "medium, many ranks: 2 lg p rounds instead of the ring's 2 (p - 1)",
        bytes=_up_to(_MIB), ranks=_from(8)),
    Row("all_reduce", "rabenseifner", "very many ranks: the rounds of a ring cost more than its evenness gains",
        bytes=_up_to(16 * _MIB), ranks=_from(64)),
    Row("all_reduce", "ring", "large: every link carries the fewest bytes there can be, all the time"),

    *_ways("reduce_scatter", 32 * _KIB),
    Row("reduce_scatter", "naive", "small, few ranks: all messages under way at once, in one round",
        bytes=_up_to(512 * _KIB), ranks=(0, 8)),
    Row("reduce_scatter", "rabenseifner", "small, many ranks: lg p rounds", bytes=_up_to(256 * _KIB), ranks=_from(9)),
    Row("reduce_scatter", "pairwise", "every part goes straight to its owner, who adds; the input stays as it is"),

    *_ways("all_gather", 8 * _KIB),
    Row("all_gather", "naive", "small, few ranks: all messages under way at once, in one round",
        bytes=_up_to(_MIB), ranks=(0, 8)),
    Row("all_gather", "bruck", "small, many ranks: lg p rounds", bytes=_up_to(64 * _KIB), ranks=_from(9)),
    Row("all_gather", "ring", "large: every link carries the fewest bytes there can be, all the time"),

    *_ways("all_to_all", 8 * _KIB),
    Row("all_to_all", "naive", "small, few ranks: all messages under way at once, in one round",
        bytes=_up_to(_MIB), ranks=(0, 8)),
    Row("all_to_all", "bruck", "small, many ranks: lg p rounds, though blocks are passed on",
        bytes=_up_to(32 * _KIB), ranks=_from(16)),
    Row("all_to_all", "pairwise", "each block goes straight to its rank, one partner at a time"),
)  # fmt: skip
