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

    On a stage with whole backwards only these count as gradients of the input, with no part for the weights. What a
    stage never ran takes no time.
    """
    lengths: dict[tuple[type, int], list[float]] = {}
    for span in spans:
        if isinstance(span.action, Forward | Backward | BackwardInput | BackwardWeight):
            lengths.setdefault((type(span.action), span.action.stage), []).append(float(span.stop - span.start))
    found = {key: median(values) for key, values in lengths.items()}

    def times(*kinds: type) -> list[float]:
        return [next((found[kind, s] for kind in kinds if (kind, s) in found), 0.0) for s in range(len(plan.places))]

    return Times(times(Forward), times(BackwardInput, Backward), times(BackwardWeight))
