"""What `hpctrain plan` shows of a pipeline: its stages, the grid of its schedule, and how other schedules compare.

Owns the tables. Loads no array library.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from hpctrain.cli.tables import new_table, rows_table, shown_bytes
from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.draw import draw
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.simulate import simulate
from hpctrain.plan.pipeline.stash import peaks

if TYPE_CHECKING:
    from hpctrain.cli.stages import Stages
    from hpctrain.config.records import Config

__all__ = ["bubbles_table", "stages_shown"]

#: Ranks times micro-batches above which simulating every pipeline schedule would take seconds.
MOST_SIMULATED = 4096
#: Letters of a line of the grid above which a terminal only shows a tangle.
MOST_LETTERS = 400


def stages_shown(cut: Stages, config: Config, element: int) -> Iterator[Any]:
    """The table of the stages and the grid; `element` is the bytes of one number."""
    from hpctrain.train.recipe import make_shape

    sizes = {name: prod(shape) for name, shape in make_shape(config).parameters().items()}
    note = "; training measures and cuts anew" if config.pipeline.layers == "time" else ""
    how = config.pipeline.layers if isinstance(config.pipeline.layers, str) else list(config.pipeline.layers)
    title = f"pipeline, layers = {how!r}{note}\nheld: most micro-batches at a time; activations: of these, an estimate"
    table = new_table(title, "stage", "rank", "layers", "parameters", "held", "activations", words=("layers",))
    for stage, peak in enumerate(cut.proof.stages):
        part = stage % cut.plan.depth
        layers, names = cut.layers[part], cut.parameters[part]
        ends = " .. ".join(dict.fromkeys((layers[0], layers[-1]))) if layers else ""
        table.add_row(str(stage), str(cut.plan.places[stage]), f"{len(layers)}: {ends}" if layers else "none",
                      f"{sum(sizes[name] for name in names):,}", str(peak.held),
                      shown_bytes(peak.held * cut.activations[part] * element))
    yield table
    title, *lines = draw(cut.timeline).splitlines()
    yield f"{title}; all stages take equal times, a backward twice a forward"
    if max(map(len, lines)) <= MOST_LETTERS:
        yield "\n".join(lines)
    else:
        yield "too wide for a terminal; --png FILE draws it, and so does `hpctrain draw`"
    yield ""


def bubbles_table(plan: PipelinePlan) -> Any:
    """What each schedule with a flush would cost, all stages alike, a backward twice a forward.

    Not the automatic one, which is for measured times.
    """
    ranks, micro_batches = plan.num_ranks, plan.num_micro_batches
    sizes = f"{ranks} ranks, {micro_batches} micro-batches"
    if ranks * micro_batches > MOST_SIMULATED:
        return rows_table("pipeline schedules",
                          [("bubble", f"{sizes}: `hpctrain draw` simulates one schedule of this size")])
    rows = [("bubble of", f"{sizes}, as part of the ideal time")]
    for name, (_, options) in SCHEDULES.items():
        if "times" in options:
            continue
        other = schedule(name, ranks, micro_batches)
        if other.weights == "one":
            most = max(peak.held for peak in peaks(other)) * ranks / other.depth  # a chunk holds less than a rank
            bubble = 100 * simulate(other).bubble_of_ideal
            rows.append((name, f"{bubble:.1f} %, a rank holds up to {most:.4g} micro-batch{'es' * (most != 1)}"))
    return rows_table("pipeline schedules", rows)
