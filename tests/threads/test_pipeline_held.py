"""What a pipeline holds while it runs, and when it runs what: as planned."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pipeline_parity as pp
import pytest

import hpctrain.numpy as n
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.stash import peaks, stage_peaks
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer


class Counted:
    """A stage that counts the stashes that are alive, whoever holds them."""

    def __init__(self, model: Any) -> None:
        self._model, self._alive, self.most = model, weakref.WeakSet(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs, kept = self._model.forward(*args, **kwargs)
        stash = _Stash(kept)
        self._alive.add(stash)
        self.most = max(self.most, len(self._alive))
        return outputs, stash

    def backward(self, stash: Any, *args: Any) -> Any:
        return self._model.backward(stash.kept, *args)

    def backward_input(self, stash: Any, *args: Any) -> Any:
        return self._model.backward_input(stash.kept, *args)


class _Stash:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(("num_ranks", "number"), [(1, 3), (2, 4), (3, 8), (4, 9)])
def test_no_more_is_stashed_than_planned(name: str, num_ranks: int, number: int) -> None:
    plan = schedule(name, num_ranks, number)
    planned = stage_peaks(plan)
    together = peaks(plan)  # of a rank that has a stage twice

    def run(context: Any) -> None:
        network = pp.layers()
        made: dict[int, Counted] = {}

        def stage(s: int) -> Counted:
            assert s not in made
            made[s] = Counted(n.stage(network, n.cross_entropy, pp.uniform(8, plan.depth), s))
            return made[s]

        trainer = PipelineTrainer(context, stage, Pipeline(name), **pp.options())
        trainer.step(pp.global_batch(number))
        mine = plan.stages_of(context.rank)
        assert trainer.peaks == {s: planned[s] for s in mine}
        assert {s: model.most for s, model in made.items()} == {
            s % plan.depth: planned[s].stash if len(made) == len(mine) else together[context.rank].stash for s in mine}

    pp.on_threads(num_ranks, run)


@pytest.mark.parametrize("name", ["zb-h1", "dualpipe-v", "dualpipe"])
def test_the_trace_is_the_plan_that_ran(name: str) -> None:
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(name), trace=True)
        trainer.step(pp.global_batch(4))
        plan, spans = trainer.plan(4), trainer.trace()
        kinds = Forward | Backward | BackwardInput | BackwardWeight
        for rank, order in enumerate(plan.orders):
            mine = [span for span in spans if span.rank == rank]
            assert [span.action for span in mine] == [action for action in order if isinstance(action, kinds)]
            assert all(0 <= a.start <= a.stop <= b.start for a, b in pairwise(mine))
        ends = {(span.action.stage, span.action.micro_batch): span.stop for span in spans
                if isinstance(span.action, Forward)}
        for span in spans:  # one clock: what is needed was there
            if isinstance(span.action, Forward) and (before := plan.before(span.action.stage)) is not None:
                assert ends[before, span.action.micro_batch] <= span.stop

    pp.on_threads(3, run)
