"""PipeDream's schedules without a flush: no bubble after the start, but gradients of older weights.

    pipedream, 2 ranks       F0 F1 B0 U F2 B1 U F3 B2 U ...        micro-batch 2 goes forward with one update, and its
                                F0 B0 U F1 B1 U F2 B2 U ...        backward uses the same weights: they are stashed

Another trajectory than that of one process; `versions` says which weights each micro-batch meets. A plan here covers
several updates. Sources: PipeDream, arXiv 1806.03377; PipeDream-2BW, 2006.09503. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.classic import one_f_one_b
from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan, require
from hpctrain.plan.schedule import Action, Backward, OptimizerStep, ReduceGrads

__all__ = ["pipedream", "pipedream_2bw"]


def pipedream(num_ranks: int, num_micro_batches: int, *, vertical: bool = False) -> PipelinePlan:
    """1F1B with an update after every micro-batch, and as many versions of the weights as micro-batches under way.

    With `vertical` (vertical sync) all stages use the version that the micro-batch met at the first.
    """
    return _updated("pipedream", num_ranks, num_micro_batches, 1, "vertical" if vertical else "stash")


def pipedream_2bw(num_ranks: int, num_micro_batches: int, per_update: int | None = None) -> PipelinePlan:
    """1F1B with an update every `per_update` micro-batches, each from weights one update old: two versions are enough.

    W(t + 1) = W(t) - lr grad(W(t - 1)). `per_update` is the number of ranks when not given; the last update may be of
    fewer micro-batches.

    Raises:
        ConfigError: sizes below 1, or `per_update` so small that the weights of the update before are not there yet.
    """
    require("ranks", num_ranks)
    per_update = num_ranks if per_update is None else per_update
    require("micro-batches per update", per_update)
    if per_update < num_ranks - 1:
        raise ConfigError(f"micro-batches per update = {per_update} must be at least ranks - 1 = {num_ranks - 1}, so "
                          f"that two versions of the weights are enough")
    return _updated("pipedream-2bw", num_ranks, num_micro_batches, per_update, "double")


def _updated(name: str, num_ranks: int, num_micro_batches: int, per_update: int, weights: str) -> PipelinePlan:
    flushed = one_f_one_b(num_ranks, num_micro_batches)
    orders = [list(_with_updates(order[:-2], num_micro_batches, per_update)) for order in flushed.orders]
    return make_plan(name, num_micro_batches, flushed.places, orders, weights=weights)


def _with_updates(order: tuple[Action, ...], num_micro_batches: int, per_update: int) -> Iterator[Action]:
    """An update after the backward of every `per_update`-th micro-batch and of the last."""
    for action in order:
        yield action
        if isinstance(action, Backward):
            seen = action.micro_batch + 1
            if seen % per_update == 0 or seen == num_micro_batches:
                yield ReduceGrads()
                yield OptimizerStep()
