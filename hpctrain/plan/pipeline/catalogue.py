"""The register of pipeline schedules: by name, with what each can be told.

Owns the names; the schedules are in the files next to it. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.plan.pipeline import automatic, classic, dual, stale, zero_bubble
from hpctrain.plan.pipeline.plan import PipelinePlan

__all__ = ["RUNNABLE", "SCHEDULES", "STALE", "schedule"]

#: Name -> (function of ranks and micro-batches, options that it also takes).
SCHEDULES: dict[str, tuple[Callable[..., PipelinePlan], tuple[str, ...]]] = {
    "naive": (classic.naive, ()),
    "gpipe": (classic.gpipe, ("chunks",)),
    "1f1b": (classic.one_f_one_b, ()),
    "interleaved": (classic.interleaved, ("chunks", "group")),
    "pipedream": (stale.pipedream, ()),
    "pipedream-vertical": (partial(stale.pipedream, vertical=True), ()),
    "pipedream-2bw": (stale.pipedream_2bw, ("per_update",)),
    "zb-h1": (zero_bubble.zb_h1, ()),
    "zb-h2": (zero_bubble.zb_h2, ()),
    "zb-v": (zero_bubble.zb_v, ()),
    "zb-auto": (automatic.automatic, ("times", "limit", "weight_part")),
    "dualpipe": (dual.dualpipe, ()),
    "dualpipe-v": (dual.dualpipe_v, ()),
}

#: Those that update while micro-batches are under way, with several versions of the weights.
STALE = tuple(name for name in SCHEDULES if name.startswith("pipedream"))

#: Those that update all ranks together, from one version of the weights: they give the step of one process.
RUNNABLE = tuple(name for name in SCHEDULES if name not in STALE)


def schedule(name: str, num_ranks: int, num_micro_batches: int, **options: Any) -> PipelinePlan:
    """The plan of the schedule `name`. Options that are None count as not given.

    Raises:
        ConfigError: an unknown name, an option that this schedule does not take, or an illegal size.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} is unknown{nearest(name, SCHEDULES)}; legal are {choices(SCHEDULES)}")
    make, takes = SCHEDULES[name]
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in takes:
            others = [other for other, (_, legal) in SCHEDULES.items() if key in legal]
            raise ConfigError(f"schedule {name!r} takes no {key} (given: {value!r}); for {key} take {choices(others)}")
    return make(num_ranks, num_micro_batches, **given)
