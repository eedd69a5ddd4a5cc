"""Times of stages from what really ran, so that a plan can be simulated in seconds and laid beside its run.

    real spans -> stage_times -> simulate(plan, times): what the step would have taken without delays and messages

Owns the statistics. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.simulate import Times
from hpctrain.plan.pipeline.trace import Span
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward

__all__ = ["stage_times"]


def stage_times(plan: PipelinePlan, spans: Iterable[Span]) -> Times:
    """The median time of each kind of action on each stage of `plan`, in the unit of the spans.

    A whole backward counts as gradient of the input and has no part for the weights, unless the stage has both parts
    apart somewhere; then the weights' median is taken off it. What a stage never ran takes no time.
    """
    lengths: dict[tuple[type, int], list[float]] = {}
    for span in spans:
        if isinstance(span.action, Forward | Backward | BackwardInput | BackwardWeight):
            lengths.setdefault((type(span.action), span.action.stage), []).append(float(span.stop - span.start))
    found = {key: median(values) for key, values in lengths.items()}
    stages = range(len(plan.places))
    weight = [found.get((BackwardWeight, stage), 0.0) for stage in stages]
    whole = [max(0.0, found.get((Backward, stage), 0.0) - weight[stage]) for stage in stages]
    return Times([found.get((Forward, stage), 0.0) for stage in stages],
                 [found.get((BackwardInput, stage), whole[stage]) for stage in stages], weight)
