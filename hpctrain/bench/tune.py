"""From measured times to a table of algorithms for these ranks. Pure.

Owns how a winner is found without flapping: going through the sizes, a change of algorithm has a price, so a challenger
must be clearly faster at one size or faster at several. The shipped choice is the one to beat at the smallest size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from math import inf, isqrt, log

from hpctrain.bench.figures import Measured, shown_bytes
from hpctrain.collectives.choice_row import ACROSS_NODES, REDUCING, WAYS, Range, Row, is_half
from hpctrain.collectives.choose import Chooser, ways

__all__ = ["SWITCH_GAIN", "merge", "tuned_rows", "winners"]

#: A challenger must be faster by this factor, multiplied up over the sizes that it would get.
SWITCH_GAIN = 1.15


def winners(seconds: Sequence[dict[str, float]], incumbent: str, gain: float = SWITCH_GAIN) -> list[str]:
    """The algorithm for each size: the way through the sizes with the least sum of log(time) + log(gain) x changes.

    `seconds` holds one {algorithm: median} a size, ascending, with the same algorithms in each; inf where one is not
    offered.
    """
    price = log(gain)
    # best[a]: cost of the best way to this size that ends with algorithm a, and that way.
    best = {name: (0.0 if name == incumbent else price, [name]) for name in seconds[0]}
    for k, times in enumerate(seconds):
        if k > 0:
            best = {name: min(((cost + price * (way[-1] != name), [*way, name]) for cost, way in best.values()),
                              key=lambda pair: (pair[0], pair[1][-2] != pair[1][-1])) for name in times}
        best = {name: (cost + log(times[name]), way) for name, (cost, way) in best.items()}
    return min(best.values(), key=lambda pair: (pair[0], pair[1]))[1]


def tuned_rows(measured: Sequence[Measured], num_nodes: int) -> list[Row]:
    """The rows for one operation and dtype, from its measurements at ascending sizes on these ranks and nodes.

    Ranges meet half way (geometrically) between two sizes; the first begins at 0 and the last has no end.
    """
    first = measured[0]
    names = [name for name in ways(first.operation) if any(name in one.times for one in measured)
             and (num_nodes > 1 or name not in ACROSS_NODES)]
    if not names:
        return []
    seconds = [{name: statistics.median(one.times.get(name, [inf])) for name in names} for one in measured]
    shipped = Chooser().choose(first.operation, first.num_bytes, first.num_ranks, num_nodes, first.dtype).algorithm
    dtypes = "any" if first.operation not in REDUCING else "half" if is_half(first.dtype) else "plain"
    return [Row(first.operation, name, reason, bytes=ends, ranks=(first.num_ranks, first.num_ranks),
                nodes=(num_nodes, num_nodes), dtypes=dtypes)
            for name, reason, ends in _ranges(measured, seconds, shipped, (0, None))]


def _ranges(measured: Sequence[Measured], seconds: Sequence[dict[str, float]], incumbent: str,
            ends: Range) -> Iterator[tuple[str, str, Range]]:
    """(algorithm, reason, bytes) within `ends`. Behind what not every array or transport has, what to take instead."""
    chosen = winners(seconds, incumbent)
    for start, stop in _runs(chosen):
        low = ends[0] if start == 0 else _between(measured[start - 1], measured[start])
        high = ends[1] if stop == len(chosen) else _between(measured[stop - 1], measured[stop]) - 1
        name, middle = chosen[start], (start + stop - 1) // 2
        yield name, _reason(measured[middle], name, seconds[middle]), (low, high)
        others = [{n: t for n, t in times.items() if n != name} for times in seconds[start:stop]]
        if name in WAYS and others[0]:
            yield from _ranges(measured[start:stop], others, incumbent, (low, high))


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, then what they leave of the old ones: not those for the same calls, nor those never reached."""
    kinds = {(row.operation, row.ranks, row.nodes, row.dtypes) for row in new}
    kept = [row for row in old if (row.operation, row.ranks, row.nodes, row.dtypes) not in kinds]
    return [*new, *(row for row in kept if not any(other.covers(row) for other in new))]


def _runs(chosen: Sequence[str]) -> Iterator[tuple[int, int]]:
    """[start, stop) of equal neighbours."""
    start = 0
    for stop in range(1, len(chosen) + 1):
        if stop == len(chosen) or chosen[stop] != chosen[start]:
            yield start, stop
            start = stop


def _between(smaller: Measured, larger: Measured) -> int:
    return isqrt(smaller.num_bytes * larger.num_bytes)


def _reason(one: Measured, algorithm: str, seconds: dict[str, float]) -> str:
    others = sorted((time, name) for name, time in seconds.items()
                    if name != algorithm and time < inf)
    next_best = f", next {others[0][1]} {1e6 * others[0][0]:.4g} us" if others else ""
    return f"measured at {shown_bytes(one.num_bytes)}: {1e6 * seconds[algorithm]:.4g} us{next_best}"
