"""Pipelines for property-based tests: those of the register at random sizes, and any other that can be run."""

from __future__ import annotations

from hypothesis import strategies as st

from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward
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
