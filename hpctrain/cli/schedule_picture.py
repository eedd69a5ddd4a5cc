"""A pipeline's timeline as PNG: ranks are rows, time runs to the right, each kind of action has its colour.

Owns the look. The text in `plan.pipeline.draw` says the same. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.simulate import Timeline
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, symbol

__all__ = ["draw_schedule"]

_COLOURS = {Forward: "#4c78a8", Backward: "#f2a65a", BackwardInput: "#e45756", BackwardWeight: "#72b97a"}
_NAMES = {Forward: "forward", Backward: "backward", BackwardInput: "gradient of the input",
          BackwardWeight: "gradient of the weights"}
#: Above this many actions their names would be smaller than the eye can read.
MOST_NAMES = 600


def draw_schedule(timeline: Timeline, path: Path) -> None:
    """Writes the picture to `path`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(f"a PNG needs matplotlib (pip install matplotlib): {error}") from None

    plan = timeline.plan
    shortest = min((span.stop - span.start for row in timeline.spans for span in row if span.stop > span.start),
                   default=1)
    width = min(40.0, max(9.0, 0.28 * float(timeline.makespan / shortest)))  # inches: room for a name in each box
    figure = Figure(figsize=(width, 1.6 + 0.5 * plan.num_ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    several = any(len(plan.stages_of(rank)) > 1 for rank in range(plan.num_ranks))
    named = sum(map(len, timeline.spans)) <= MOST_NAMES
    for rank, spans in enumerate(timeline.spans):
        axes.broken_barh(
            [(float(span.start), float(span.stop - span.start)) for span in spans], (rank - 0.45, 0.9),
            facecolors=[_COLOURS[type(span.action)] for span in spans], edgecolor="white", linewidth=0.5)
        for span in spans if named else ():
            name = symbol(span.action).rstrip("*")
            if several and isinstance(span.action, Compute):
                name = f"{span.action.stage}\n{name}"
            axes.text(float(span.start + span.stop) / 2, rank, name, linespacing=0.9,
                      ha="center", va="center", fontsize=6, color="white", clip_on=True)
    used = [kind for kind in _COLOURS if any(type(span.action) is kind for spans in timeline.spans for span in spans)]
    axes.legend(handles=[Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in used], fontsize="small",
                loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)
    axes.set_title(f"{plan.name}: makespan {float(timeline.makespan):.6g}, bubble {float(timeline.bubble):.6g} "
                   f"({100 * timeline.bubble_of_ideal:.1f} % of the ideal time)")
    axes.set_yticks(range(plan.num_ranks), [f"rank {rank}" for rank in range(plan.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, float(timeline.makespan) or 1)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
