"""The schedules with a flush and a whole backward: naive, GPipe, 1F1B, interleaved 1F1B.

    3 ranks, 3 micro-batches, a backward twice as long as a forward

    gpipe    F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --       1f1b   F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --
             .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 -- .  .               .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- .  .
             .  .  F0 F1 F2 B0 -- B1 -- B2 -- .  .  .  .               .  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  .  .

Each function gives the plan for all ranks. Sources: GPipe, arXiv 1811.06965; PipeDream-Flush (1F1B), 2006.09503;
interleaved, Megatron-LM 2, 2104.04473, section 2.2. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.plan import PipelinePlan, make_plan, require
from hpctrain.plan.schedule import Backward, Compute, Forward

__all__ = ["gpipe", "group_size", "interleaved", "naive", "one_f_one_b", "order_table"]


def naive(num_ranks: int, num_micro_batches: int = 1) -> PipelinePlan:
    """One micro-batch at a time, forward and back; one rank works, the others wait. Stash 1 on every rank."""
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    orders: list[list[Compute]] = []
    for rank in range(num_ranks):
        orders.append([])
        for i in range(num_micro_batches):
            orders[rank] += [Forward(i, rank), Backward(i, stage=rank)]
    return make_plan("naive", num_micro_batches, range(num_ranks), orders)


def gpipe(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> PipelinePlan:
    """All forwards, then all backwards. Bubble (ranks - 1) / (chunks micro-batches) of the ideal time; stash all."""
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    require("chunks", chunks)
    orders: list[list[Compute]] = []
    for rank in range(num_ranks):
        stages = range(rank, chunks * num_ranks, num_ranks)
        orders.append([*(Forward(i, s) for s in stages for i in range(num_micro_batches)),
                       *(Backward(i, stage=s) for s in reversed(stages) for i in range(num_micro_batches))])
    return make_plan("gpipe", num_micro_batches, tuple(range(num_ranks)) * chunks, orders)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> PipelinePlan:
    """1F1B: GPipe's time, but rank r stashes min(ranks - r, micro-batches) instead of all."""
    require("ranks", num_ranks)
    require("micro-batches", num_micro_batches)
    orders = []
    for rank in range(num_ranks):
        forwards = [Forward(i, rank) for i in range(num_micro_batches)]
        backwards = [Backward(i, stage=rank) for i in range(num_micro_batches)]
        orders.append(alternate(forwards, backwards, min(num_ranks - 1 - rank, num_micro_batches)))
    return make_plan("1f1b", num_micro_batches, range(num_ranks), orders)


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int = 2, group: int | None = None) -> PipelinePlan:
    """1F1B over `chunks` stages a rank: bubble (ranks - 1) / (chunks micro-batches) of the ideal time.

    `group` is the number of micro-batches that pass one chunk before the next one's turn; see `group_size`. Rank r has
    2 (ranks - 1 - r) + (chunks - 1) group + 1 stage inputs in its stash (at most chunks x micro-batches): more than
    1F1B, not less.

    Raises:
        ConfigError: a size below 1, or a group for which ranks would wait for each other for ever.
    """
    require("ranks", num_ranks)
    require("chunks", chunks)
    require("micro-batches", num_micro_batches)
    group = group_size(num_ranks, num_micro_batches) if group is None else group
    if not _is_group(num_ranks, num_micro_batches, group):
        raise ConfigError(f"group = {group!r} must be {min(num_ranks, num_micro_batches)}..{num_micro_batches}, and "
                          f"leave no rest or one of at least {num_ranks} from {num_micro_batches} micro-batches; "
                          f"{group_size(num_ranks, num_micro_batches)} would do")
    table = order_table(num_micro_batches, chunks, group)
    orders = []
    for rank in range(num_ranks):
        forwards = [Forward(i, c * num_ranks + rank) for i, c in table]
        backwards = [Backward(i, stage=(chunks - 1 - c) * num_ranks + rank) for i, c in table]
        behind = num_ranks - 1 - rank  # with one chunk this is 1F1B, which needs one forward a rank, not two
        warm_up = min((2 if chunks > 1 else 1) * behind + (chunks - 1) * group, len(table))
        orders.append(alternate(forwards, backwards, warm_up))
    return make_plan("interleaved", num_micro_batches, tuple(range(num_ranks)) * chunks, orders)


def order_table(num_micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the k-th forward, the same on every rank: a group through all chunks, then the next."""
    groups = [range(first, min(first + group, num_micro_batches)) for first in range(0, num_micro_batches, group)]
    return [(i, c) for members in groups for c in range(chunks) for i in members]


def group_size(num_ranks: int, num_micro_batches: int) -> int:
    """The smallest legal group: the number of ranks where it divides the micro-batches (the classic schedule)."""
    legal = (n for n in range(min(num_ranks, num_micro_batches), num_micro_batches + 1)
             if _is_group(num_ranks, num_micro_batches, n))
    return next(legal)


def alternate(forwards: list[Forward], backwards: list[Backward], warm_up: int) -> Iterator[Compute]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up:]


def _is_group(num_ranks: int, num_micro_batches: int, group: int) -> bool:
    if not min(num_ranks, num_micro_batches) <= group <= num_micro_batches:
        return False
    rest = num_micro_batches % group
    return rest == 0 or rest >= num_ranks
