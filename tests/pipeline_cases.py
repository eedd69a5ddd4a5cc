"""Pipelines for property-based tests: those of the register at random sizes, and any other that can be run."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep, ReduceGrads
from hpctrain.runtime.pipeline_options import RUNNABLE

#: Every schedule that can be run, with every number of chunks that it can be told (None: it cannot).
CHUNKS = [(name, chunks) for name in RUNNABLE
          for chunks in ((1, 2, 3) if "chunks" in SCHEDULES[name][1] else (None,))]
NUMBERS = (4, 1, 7, 2, 10, 3, 8, 5, 9, 6)  # of micro-batches, one update each


@st.composite
def plans(draw):
    name = draw(st.sampled_from(list(SCHEDULES)))
    ranks, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    takes = SCHEDULES[name][1]
    options = {"chunks": draw(st.integers(1, 3))} if "chunks" in takes else {}
    if "per_update" in takes:
        options["per_update"] = draw(st.integers(max(1, ranks - 1), ranks + 3))
    if "limit" in takes:
        options["limit"] = draw(st.integers(1, 2 * ranks))
    return schedule(name, ranks, micro_batches, **options)


@st.composite
def runnable(draw):
    """Any schedule at all: a random rank does a random thing that can be done now, until all is done."""
    ranks, depth, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    copies = draw(st.sampled_from((1, 1, 2, 3)))
    stages = copies * depth
    places = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    through = make_plan("all", micro_batches, places, [[]] * ranks, copies=copies).micro_batches_of
    left = {("F", s, i) for s in range(stages) for i in through(s)}
    for s in range(stages):
        for i in through(s):
            left |= {("B", s, i)} if draw(st.booleans()) else {("I", s, i), ("W", s, i)}
    done, orders = set(), [[] for _ in range(ranks)]

    def ready(kind, s, i):
        if kind == "F":
            return s % depth == 0 or ("F", s - 1, i) in done
        if kind == "W":
            return ("I", s, i) in done
        last = (s + 1) % depth == 0
        return ("F", s, i) in done and (last or ("B", s + 1, i) in done or ("I", s + 1, i) in done)

    while left:
        kind, s, i = draw(st.sampled_from(sorted(what for what in left if ready(*what))))
        left.remove((kind, s, i))
        done.add((kind, s, i))
        orders[places[s]].append({"F": Forward(i, s), "B": Backward(i, stage=s), "I": BackwardInput(i, s),
                                  "W": BackwardWeight(i, stage=s)}[kind])
    return make_plan("random", micro_batches, places, orders, copies=copies)


@st.composite
def updating(draw):
    """Any schedule of several updates: (plan, micro-batches of each update, by stage and micro-batch the version used).

    Each forward uses the newest weights, and its backward the same.
    """
    ranks, stages, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    places = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    shuffled = draw(st.permutations(range(micro_batches)))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, micro_batches - 1)) if micro_batches > 1 else st.just(set()))),
            micro_batches]
    groups = [sorted(shuffled[a:b]) for a, b in pairwise(cuts)]
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    left = {("F", s, i) for s in range(stages) for i in range(micro_batches)}
    for s in range(stages):
        for i in range(micro_batches):
            left |= {("B", s, i)} if draw(st.booleans()) else {("I", s, i), ("W", s, i)}
    left |= {("U", rank, g) for rank in set(places) for g in range(len(groups))}
    done, orders, made, used = set(), [[] for _ in range(ranks)], [0] * ranks, [{} for _ in range(stages)]

    def ready(kind, s, i):
        if kind == "U":
            return made[s] == i and not any(w != "U" and places[t] == s and group_of[j] == i for w, t, j in left)
        if kind == "F":
            return s == 0 or ("F", s - 1, i) in done
        if kind in "BW" and made[places[s]] != group_of[i]:
            return False
        if kind == "W":
            return ("I", s, i) in done
        return ("F", s, i) in done and (s == stages - 1 or ("B", s + 1, i) in done or ("I", s + 1, i) in done)

    while left:
        kind, s, i = draw(st.sampled_from(sorted(what for what in left if ready(*what))))
        left.remove((kind, s, i))
        done.add((kind, s, i))
        if kind == "U":
            orders[s] += [ReduceGrads(), OptimizerStep()]
            made[s] += 1
            continue
        if kind == "F":
            used[s][i] = made[places[s]]
        orders[places[s]].append({"F": Forward(i, s), "B": Backward(i, stage=s), "I": BackwardInput(i, s),
                                  "W": BackwardWeight(i, stage=s)}[kind])
    return make_plan("random", micro_batches, places, orders, weights="stash"), groups, used
