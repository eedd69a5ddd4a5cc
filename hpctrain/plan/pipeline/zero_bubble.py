"""Schedules that split the backward, so that weight gradients (W) fill what would be idle: ZB-H1, ZB-H2, ZB-V.

    zb-h1, 4 ranks, 4 micro-batches      F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
                                         .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
                                         ...

Source: zero bubble pipeline parallelism, arXiv 2401.10241; ZB-V, 2405.15362. I is the gradient of a stage's input, W
that of its weights. Pure, standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan, require
from hpctrain.plan.schedule import BackwardInput, BackwardWeight, Compute, Forward

__all__ = ["zb_h1", "zb_h2", "zb_v"]


def zb_h1(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """Bubble (ranks - 1)(F + I - W) with the stash of 1F1B, where W takes no longer than F or I.

    Bubble means makespan less the work of a rank.
    """
    return _handcrafted("zb-h1", num_ranks, num_micro_batches, 1)


def zb_h2(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """No idle time inside a rank's span at equal times, twice the stash (2 ranks - 1).

    Caveat: the ranks' spans are shifted by F each. The paper's bubble (ranks - 1)(F + I - 2W) is reached only where
    a rank may update without waiting for the others; with a barrier there (a gradient norm is one) the bubble is
    (ranks - 1) max(F, F + I - 2W), which at equal times is ZB-H1's.
    """
    return _handcrafted("zb-h2", num_ranks, num_micro_batches, 2)


def zb_v(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """Two chunks a rank, placed as a V: rank r has stages r and 2 ranks - 1 - r. 1F1B's stash, evenly on all ranks.

    At equal times no rank idles inside its span: makespan (F + I + W) micro-batches + (ranks - 1) F / 2, from
    2 ranks - 1 micro-batches on.
    """
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    made = max(num_micro_batches, 2 * num_ranks - 1)  # the shape of fewer is the same, with holes
    orders = [[action for action in _v_order(rank, num_ranks, made) if action.micro_batch < num_micro_batches]
              for rank in range(num_ranks)]
    return make_plan("zb-v", num_micro_batches, (*range(num_ranks), *reversed(range(num_ranks))), orders)


def _handcrafted(name: str, num_ranks: int, num_micro_batches: int, ahead: int) -> PipelinePlan:
    """Rank r runs `ahead` (ranks - 1 - r) forwards first; its weight gradients follow the inputs' `ahead` r later."""
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        warm_up, lag = min(ahead * (num_ranks - 1 - rank), num_micro_batches), ahead * rank
        order: list[Compute] = [Forward(i, rank) for i in range(warm_up)]
        for i in range(num_micro_batches):
            if warm_up + i < num_micro_batches:
                order.append(Forward(warm_up + i, rank))
            order.append(BackwardInput(i, rank))
            if i >= lag:
                order.append(BackwardWeight(i - lag, stage=rank))
        order += [BackwardWeight(i, stage=rank) for i in range(max(0, num_micro_batches - lag), num_micro_batches)]
        orders.append(order)
    return make_plan(name, num_micro_batches, range(num_ranks), orders)


def _v_order(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Compute]:
    """The order of ZB-V for at least 2 ranks - 1 micro-batches."""
    stages = (rank, 2 * num_ranks - 1 - rank)
    done: Counter[str] = Counter()

    def take(kinds: str) -> Iterator[Compute]:
        for kind in kinds.split():
            i, stage = done[kind], stages[int(kind[1])]
            done[kind] += 1
            yield (Forward(i, stage) if kind[0] == "F" else BackwardInput(i, stage) if kind[0] == "I"
                   else BackwardWeight(i, stage=stage))

    yield from take("F0 " * (2 * (num_ranks - rank) - 1))
    yield from take("F1 F0 " * rank)
    yield from take("F1 I1 W1 " * (num_ranks - rank))
    while done["F1"] < num_micro_batches:
        yield from take(("F0 " if done["F0"] < num_micro_batches else "") + "I0 W0 F1 I1 W1")
    yield from take("I0 I1 " * rank)
    yield from take("I0 W0 " * (num_ranks - rank))
    yield from take("W1 " * (num_micro_batches - done["W1"]))
    yield from take("W0 " * (num_micro_batches - done["W0"]))
