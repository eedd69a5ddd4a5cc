"""Time and bus bandwidth against size, one line a contender, as a picture.

Owns its look. The dotted line is what one memory copy of the same bytes allows, all ranks copying at the same time.
Must not know how the numbers came about. Needs matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.bench.contenders import NATIVE
from hpctrain.bench.figures import Measured, bus_factor, shown_bytes
from hpctrain.bench.survey import CHOSEN, names_of

__all__ = ["draw_picture"]


def draw_picture(measured: Sequence[Measured], path: Path) -> None:
    """Draws one operation and dtype at all its sizes as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = measured[0]
    ranks = f"{first.num_ranks} rank{'s' if first.num_ranks != 1 else ''}"
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{first.operation} of {first.dtype}, {ranks}")
    time, bandwidth = figure.subplots(1, 2)
    time.set_ylabel("time of a call (µs)")
    bandwidth.set_ylabel("bus bandwidth (GB/s)")
    for name in names_of(measured):
        mine = [one for one in measured if name in one.times]
        medians = [statistics.median(one.times[name]) for one in mine]
        sizes, style = [one.num_bytes for one in mine], _style(name)
        time.plot(sizes, [1e6 * t for t in medians], label=name, **style)
        speeds = [one.bus_bandwidth(t) / 1e9 for one, t in zip(mine, medians, strict=True)]
        bandwidth.plot(sizes, [speed or None for speed in speeds], label=name, **style)  # one rank has no bus
    _draw_limit(measured, time, bandwidth)
    for axes in (time, bandwidth):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([one.num_bytes for one in measured], [shown_bytes(one.num_bytes) for one in measured])
        axes.set_xlabel("size of the whole array")
        axes.grid(alpha=0.3)
    time.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _draw_limit(measured: Sequence[Measured], time: Any, bandwidth: Any) -> None:
    """The copy as a limit: its speed, and the time that the bytes on the bus would take at that speed."""
    sizes = [one.num_bytes for one in measured]
    seconds = [statistics.median(one.copy) for one in measured]
    factors = [bus_factor(one.operation, one.num_ranks) for one in measured]
    style = {"color": "black", "linestyle": ":", "label": "memory copy of the bytes on the bus"}
    bandwidth.plot(sizes, [n / t / 1e9 for n, t in zip(sizes, seconds, strict=True)], **style)
    time.plot(sizes, [1e6 * f * t or None for f, t in zip(factors, seconds, strict=True)], **style)


def _style(name: str) -> dict[str, Any]:
    if name == NATIVE:
        return {"color": "black", "marker": "s", "markersize": 4, "linestyle": "--"}
    return {"marker": "o", "markersize": 4, "linewidth": 2.5 if name == CHOSEN else 1.2}
