"""DualPipe and DualPipeV: micro-batches from both ends, forwards of one direction beside backwards of the other.

    DualPipe    rank r of P holds stage r of one copy and stage P - 1 - r of another; half of the micro-batches enters
                at rank 0, half at rank P - 1. Needs the parameters twice.
    DualPipeV   its lower half folded: one model of 2 P stages in a V, rank r holds stages r and 2 P - 1 - r

Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1, and the steps of its published schedule. A pair
"forward & backward" stands here as two actions in a row. Pure, standard library only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan, require
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward

__all__ = ["dualpipe", "dualpipe_v"]


def dualpipe(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """Two copies of the model. Bubble (ranks / 2 - 1)(F&B + B - 3W) where a forward and a backward run as one.

    B is the whole backward, F&B = F + B. That bubble is reached from 2 x ranks micro-batches on, an even number of
    them, on an even number of ranks, where neither F nor W takes longer than the gradient of the input. The rank in the
    middle of an odd number holds the same stage of both copies.
    """
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    half = (num_ranks + 1) // 2
    counts = ((num_micro_batches + 1) // 2, num_micro_batches // 2)  # through each copy
    orders = []
    for rank in range(num_ranks):
        near = int(2 * rank > num_ranks - 1)  # the copy whose first stages are close
        inner = min(rank, num_ranks - 1 - rank)
        stages = (rank, 2 * num_ranks - 1 - rank)
        order = []
        for action in _order(inner, half, max(counts[0], 2 * half)):
            copy = near ^ action.stage
            if action.micro_batch < counts[copy]:
                order.append(replace(action, stage=stages[copy], micro_batch=action.micro_batch + copy * counts[0]))
        orders.append(order)
    places = (*range(num_ranks), *reversed(range(num_ranks)))
    return make_plan("dualpipe", num_micro_batches, places, orders, copies=2)


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """One copy of the model in a V. Bubble as DualPipe's on twice the ranks, from 2 x ranks micro-batches on."""
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        stages = (rank, 2 * num_ranks - 1 - rank)
        orders.append([replace(action, stage=stages[action.stage])
                       for action in _order(rank, num_ranks, max(num_micro_batches, 2 * num_ranks))
                       if action.micro_batch < num_micro_batches])
    return make_plan("dualpipe-v", num_micro_batches, (*range(num_ranks), *reversed(range(num_ranks))), orders)


def _order(rank: int, half: int, count: int) -> Iterator[Compute]:
    """The eight steps of `rank` in a half of `half` ranks, for `count` >= 2 half micro-batches each way.

    The stage of an action is its direction here: 0 near, 1 far. I waits with its W in `later`.
    """
    done: Counter[str] = Counter()
    later: deque[Compute] = deque()

    def take(kinds: str) -> Iterator[Compute]:
        for kind in kinds.split():
            if kind == "W":
                yield later.popleft()
                continue
            direction = int(kind[1])
            key = ("F" if kind[0] == "F" else "B") + kind[1]  # I is a backward, too
            i = done[key]
            done[key] += 1
            if kind[0] == "I":
                later.append(BackwardWeight(i, stage=direction))
                yield BackwardInput(i, direction)
            else:
                yield Forward(i, direction) if kind[0] == "F" else Backward(i, stage=direction)

    outside, inside = half - rank - 1, rank + 1
    yield from take("F0 " * (2 * outside))
    yield from take("F0 F1 " * inside)
    yield from take("I1 W F1 " * outside)
    yield from take("F0 B1 F1 B0 " * (count - 2 * half + inside))
    yield from take("B1 F1 B0 " * outside)
    last = ["B1", "B0"] * inside
    yield from take(" ".join(last[:inside] + [kind.replace("B", "I") for kind in last[inside:]]))
    yield from take("W I0 " * outside)
    yield from take("W " * inside)
