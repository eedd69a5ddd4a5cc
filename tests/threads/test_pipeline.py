"""Every schedule, run on NumPy stages, equals one process: loss, gradients, norm, weights, evaluation."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pipeline_cases
import pipeline_parity as pp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpctrain
import hpctrain.numpy as n
from hpctrain.errors import ConfigError, NonFiniteError, PlanError, UnsupportedError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.stash import peaks, stage_peaks
from hpctrain.plan.pipeline.text import from_text, plan_to_text
from hpctrain.plan.schedule import Backward, BackwardInput, BackwardWeight, Forward
from hpctrain.runtime.pipeline_options import RUNNABLE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer

SMALL = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (3, 7), (4, 3), (4, 10)]
CHUNKED = [(1, 3, 2), (2, 4, 2), (2, 5, 3), (3, 1, 3), (3, 6, 2), (4, 8, 2), (4, 6, 3), (2, 3, 20)]
TRUTH: dict[Any, pp.Seen] = {}


def truth(number: int, updates: int = 2, **how: Any) -> pp.Seen:
    key = number, updates, tuple(sorted(how.items()))
    if key not in TRUTH:
        TRUTH[key] = pp.alone([pp.global_batch(number, u) for u in range(updates)], pp.layers(**how))
    return TRUTH[key]


def check(num_ranks: int, pipeline: Pipeline, number: int, updates: int = 2, **how: Any) -> list[pp.Seen]:
    expected = truth(number, updates)
    batches = [pp.global_batch(number, u) for u in range(updates)]
    return pp.on_threads(num_ranks, lambda context: pp.case(context, expected, pipeline, batches, **how))


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(("num_ranks", "number"), SMALL)
def test_every_schedule_equals_one_process(name: str, num_ranks: int, number: int) -> None:
    check(num_ranks, Pipeline(name), number)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_two_copies_equal_one_process_for_any_number_of_micro_batches(num_ranks: int) -> None:
    """Few leave a copy without any, and an odd number the copies with different ones."""
    for number in range(1, 11):
        check(num_ranks, Pipeline("dualpipe"), number, zero=hpctrain.Zero(number % 2, bucket_bytes=100))


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
@pytest.mark.parametrize(("num_ranks", "number", "chunks"), CHUNKED)
def test_chunks_equal_one_process(name: str, num_ranks: int, number: int, chunks: int) -> None:
    check(num_ranks, Pipeline(name, chunks=chunks), number)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("name", "ranks", "size", "number"), [
    ("1f1b", 2, 4, 5), ("zb-v", 2, 4, 6), ("interleaved", 2, 6, 7), ("gpipe", 1, 3, 4), ("dualpipe-v", 2, 6, 2),
    ("zb-h1", 3, 6, 1), ("dualpipe", 1, 2, 3), ("dualpipe", 2, 4, 5), ("dualpipe", 3, 6, 7), ("dualpipe", 4, 4, 3),
    ("dualpipe", 2, 6, 1),
])
def test_a_data_axis_beside_it(name: str, ranks: int, size: int, number: int, stage: int) -> None:
    """Pipelines have different numbers of micro-batches, the last cases none at all on some."""
    seen = check(size, Pipeline(name, ranks), number, 3, zero=hpctrain.Zero(stage, bucket_bytes=100))
    for parameter in ("0.weight", "1.weight", "3.weight", "5.weight"):
        copies = [s.weights[parameter] for s in seen if parameter in s.weights]
        assert len(copies) >= size // ranks
        assert all(np.array_equal(copies[0], copy) for copy in copies)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plan=pipeline_cases.runnable(), data=st.data())
def test_any_plan_that_can_run(plan: Any, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, 8), min_size=plan.depth - 1, max_size=plan.depth - 1)))
    zero = hpctrain.Zero(data.draw(st.sampled_from((0, 1))), bucket_bytes=100)
    check(plan.num_ranks, Pipeline(from_text(plan_to_text(plan))), plan.num_micro_batches, 1, bounds=(0, *cuts, 8),
          zero=zero)


@pytest.mark.parametrize("frozen", [(0, 1, 3), (7,), (3, 5)])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_frozen_stages(name: str, frozen: tuple[int, ...]) -> None:
    how = {"tied": False, "frozen": frozen}
    expected = truth(4, 2, **how)
    batches = [pp.global_batch(4, u) for u in range(2)]
    pp.on_threads(3, lambda context: pp.case(context, expected, Pipeline(name), batches, make=lambda: pp.layers(**how)))


def test_unused() -> None:
    """A tied parameter that a backward reached is none of the unused ones."""
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline("zb-v"))
        trainer.step(pp.global_batch(2))
        assert trainer.unused == frozenset()

    pp.on_threads(2, run)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_no_gradient_comes_back_to_where_nothing_is_trained(name: str) -> None:
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(name), make=lambda: pp.layers(tied=False, frozen=(0, 1, 3)))
        trainer.step(pp.global_batch(4))
        for stage, receiver in trainer._run._receivers.items():  # stages begin with layers 0, 2, 4, 6; 5 is trained
            (leaf,) = receiver._history.form.leaves
            assert leaf.gradient == (stage % 4 == 3)
            assert receiver._frame is None  # nothing is awaited that does not come

    pp.on_threads(4, run)


@pytest.mark.parametrize("bounds", [(0, 0, 4, 8), (0, 4, 4, 8), (0, 3, 8, 8), (0, 0, 0, 8), (0, 8, 8, 8)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_empty_stages(name: str, bounds: tuple[int, ...]) -> None:
    check(3, Pipeline(name), 5, bounds=bounds)


def test_different_numbers_of_micro_batches_step_by_step() -> None:
    batches = [pp.global_batch(number, number) for number in (3, 1, 6, 3)]
    expected = pp.alone(batches, pp.layers())
    pp.on_threads(2, lambda context: pp.case(context, expected, Pipeline("1f1b"), batches))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe"])
def test_masters_of_another_type(name: str, zero: int) -> None:
    how = {"precision": hpctrain.Precision(compute="float32", master="float64", accumulate="float64"),
           "zero": hpctrain.Zero(zero, bucket_bytes=100)}
    batches = [pp.global_batch(4, u) for u in range(3)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(6, lambda context: pp.case(context, expected, Pipeline(name, 3), batches, tolerance=1e-5, **how))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe"])
def test_sums_that_travel_in_another_type_do_not_hold_up_a_pipeline(name: str) -> None:
    """Many buckets, few windows, pipelines with different numbers of micro-batches."""
    how = {"precision": hpctrain.Precision(compute="float64", reduce="float32")}
    batches = [pp.global_batch(5, u) for u in range(2)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(6, lambda context: pp.case(context, expected, Pipeline(name, 2), batches, tolerance=1e-5, **how))


def test_a_rank_without_a_stage() -> None:
    def function(ranks: int, number: int) -> Any:
        orders = [[], [Forward(i, s) for i in range(number) for s in range(2)]
                  + [Backward(i, stage=s) for i in range(number) for s in (1, 0)]]
        return make_plan("second", number, (1, 1), orders)

    def run(context: Any) -> None:
        pp.case(context, truth(3), Pipeline(function), [pp.global_batch(3, u) for u in range(2)])
        report = pp.pipelined(context, Pipeline(function)).memory_report()
        assert "parameters" in report and context.world.broadcast_value(report)[:99] == report[:99]

    pp.on_threads(2, run)


def test_a_loss_scale_is_that_of_one_process() -> None:
    how = {"loss_scale": hpctrain.LossScale(initial=64.0)}
    batches = [pp.global_batch(4, u) for u in range(2)]
    expected = pp.alone(batches, pp.layers(), **how)
    pp.on_threads(2, lambda context: pp.case(context, expected, Pipeline("zb-v"), batches, **how))


# What is held --------------------------------------------------------------------------------------------------------


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


# What is refused -----------------------------------------------------------------------------------------------------


def broken(how: str) -> Any:
    plan = schedule("1f1b", 2, 2)
    first, second = plan.orders
    f0, b0, f1, *rest = second  # rank 0 has F0 F1 B0 B1
    orders = {"missing": (first[1:], second), "twice": ((first[0], *first), second),
              "cycle": ((first[0], first[2], first[1], *first[3:]), (f1, f0, b0, *rest))}[how]
    return replace(plan, orders=orders)


@pytest.mark.parametrize("how", ["missing", "cycle", "twice"])
def test_a_broken_plan_is_refused_before_anything_runs(how: str) -> None:
    made = []

    def run(context: Any) -> None:
        with pytest.raises(PlanError):
            PipelineTrainer(context, made.append, Pipeline(broken(how)),
                                                              **pp.options())

    pp.on_threads(2, run)
    assert not made


def test_a_plan_that_breaks_later_is_refused_before_it_runs() -> None:
    def function(ranks: int, number: int) -> Any:
        return schedule("1f1b", ranks, number) if number < 2 else broken("cycle")

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(function))
        assert trainer.step(pp.global_batch(1)).skipped == ""
        with pytest.raises(PlanError):
            trainer.step(pp.global_batch(2))
        assert trainer.step(pp.global_batch(1)).update == 2

    pp.on_threads(2, run)


def test_a_plan_that_updates_several_times_only_later_is_refused() -> None:
    """Which trainer it takes is decided once."""
    def function(ranks: int, number: int) -> Any:
        plan = schedule("pipedream", ranks, number)
        return replace(plan, weights="one") if number == 1 else plan

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(function))
        assert trainer.step(pp.global_batch(1)).update == 1
        with pytest.raises(UnsupportedError, match="'pipedream' for 2 micro-batches has several updates or versions"):
            trainer.step(pp.global_batch(2))

    pp.on_threads(2, run)


def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    def run(context: Any) -> None:
        for how, text in (({"zero": hpctrain.Zero(2)}, "zero.stage = 2"), ({"zero": hpctrain.Zero(3)}, "stage = 3"),
                          ({"zero": hpctrain.Zero(1, offload=hpctrain.Offload(delay=True))}, "zero.offload")):
            with pytest.raises(UnsupportedError, match=text):
                pp.pipelined(context, Pipeline("1f1b"), **how)
        with pytest.raises(ConfigError, match="does not divide"):
            Pipeline("1f1b", ranks=3).num_ranks(4)
        with pytest.raises(ConfigError, match="takes no chunks"):
            pp.pipelined(context, Pipeline("1f1b", chunks=2))
        with pytest.raises(ConfigError, match="is unknown"):
            pp.pipelined(context, Pipeline("1f2b"))
        with pytest.raises(ConfigError, match="has 1 models"):
            PipelineTrainer(context, [None], Pipeline("1f1b"), **pp.options())
        trainer = pp.pipelined(context, Pipeline(schedule("1f1b", 2, 4)))
        with pytest.raises(ConfigError, match="4 micro-batches, not for 2 and 3"):
            trainer.step(pp.global_batch(3))
        with pytest.raises(ConfigError, match="1 micro-batches on rank 0 of the pipeline, 2 on rank 1"):
            trainer.step(pp.global_batch(context.rank + 1))
        with pytest.raises(UnsupportedError, match="only some stages"):
            trainer.model.forward(None)

    pp.on_threads(2, run)


@pytest.mark.parametrize(("name", "size"), [("1f1b", 2), ("interleaved", 2), ("zb-v", 6), ("dualpipe", 2),
                                            ("dualpipe", 6)])
def test_copies_begin_with_the_values_of_the_first_stage(name: str, size: int) -> None:
    """Also where two stages of one rank have their own copies."""
    expected = truth(4)
    batches = [pp.global_batch(4, u) for u in range(2)]

    def run(context: Any) -> pp.Seen:
        def stage(s: int) -> Any:
            made = pp.layers()
            if s:
                made[-1].weight.value[...] = context.rank
            return n.stage(made, n.cross_entropy, cut, s)

        pipeline = Pipeline(name, 2)
        cut = pp.uniform(8, pipeline.first_plan(2).depth)
        trainer = PipelineTrainer(context, stage, pipeline, **pp.options())
        seen = pp.observe(trainer, pp.share(batches, trainer))
        pp.compare(seen, expected)
        return seen

    copies = [s.weights["0.weight"] for s in pp.on_threads(size, run) if "0.weight" in s.weights]
    assert all(np.array_equal(copies[0], copy) for copy in copies)


def test_a_shared_name_means_a_shared_parameter() -> None:
    def run(context: Any) -> None:
        def stage(s: int) -> Any:
            return n.stage([n.Linear(n.Parameter(np.ones((2, 2 + s))))], n.cross_entropy, (0, 1), 0)

        with pytest.raises(ConfigError, match="parameter '0.weight' is .* in stage 1"):
            PipelineTrainer(context, stage, Pipeline("1f1b"), **pp.options())

    pp.on_threads(2, run)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_what_is_not_finite_is_skipped_by_all_stages(name: str) -> None:
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline(name), max_skips=2)
        before = {parameter: np.array(w) for parameter, w in trainer.parameters()}
        with trainer.gathered(modify=0) as model:
            if context.rank == 0:
                model.parameter("1.bias")[0] = np.nan
        for _ in range(1):
            assert trainer.step(pp.global_batch(3)).skipped == "not finite"
        for parameter, weight in trainer.parameters():
            if parameter != "1.bias":
                assert np.array_equal(weight, before[parameter])
        with pytest.raises(NonFiniteError, match="the gradient of"):
            trainer.step(pp.global_batch(3))
        assert trainer.step([]).skipped == "no data"

    pp.on_threads(2, run)


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [
    ((4, Pipeline("1f1b", 4), 0), (2, Pipeline("zb-v", 2), 0)),
    ((4, Pipeline("1f1b", 2), 1), (3, Pipeline("interleaved", 3, chunks=2), 1)),
    ((2, Pipeline("zb-h1"), 0), (6, Pipeline("dualpipe-v", 2), 1)),
    ((6, Pipeline("gpipe", 3, chunks=2), 1), (1, Pipeline("naive"), 0)),
    ((3, Pipeline("dualpipe"), 1), (4, Pipeline("1f1b", 2), 0)),
    ((2, Pipeline("zb-v"), 0), (6, Pipeline("dualpipe", 3), 1)),
    ((4, Pipeline("dualpipe", 2), 1), (4, Pipeline("dualpipe", 4), 1)),
    ((1, Pipeline("dualpipe"), 0), (2, Pipeline("dualpipe"), 0)),
])
def test_it_resumes_on_other_stages(tmp_path: Any, before: Any, after: Any) -> None:
    batches = [pp.global_batch(6, u) for u in range(4)]
    expected = pp.alone(batches, pp.layers())

    def first(context: Any) -> None:
        trainer = pp.pipelined(context, before[1], zero=hpctrain.Zero(before[2], bucket_bytes=100))
        for batch in pp.share(batches[:2], trainer):
            trainer.step(batch)
        trainer.save(tmp_path, data={"at": 2})

    def second(context: Any) -> None:
        trainer = pp.pipelined(context, after[1], zero=hpctrain.Zero(after[2], bucket_bytes=100))
        assert trainer.resume(tmp_path) == {"at": 2}
        losses = [trainer.step(batch).loss for batch in pp.share(batches[2:], trainer)]
        np.testing.assert_allclose(losses, expected.losses[2:], rtol=pp.TOLERANCE)
        for name, weight in trainer.parameters():
            np.testing.assert_allclose(weight, expected.weights[name], rtol=pp.TOLERANCE, err_msg=name)

    pp.on_threads(before[0], first)
    pp.on_threads(after[0], second)


def test_a_pipelines_checkpoint_is_that_of_one_process(tmp_path: Any) -> None:
    batches = [pp.global_batch(4, u) for u in range(2)]

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline("1f1b"))
        trainer.step(batches[0])
        trainer.save(tmp_path)

    pp.on_threads(3, run)
    context = pp.parity.context_of(pp.single())
    trainer = hpctrain.runtime.step.Trainer(context, n.network(pp.layers(), n.cross_entropy), **pp.options())
    trainer.resume(tmp_path, policy="require")
    expected = pp.alone(batches, pp.layers())
    assert trainer.step(batches[1]).loss == pytest.approx(expected.losses[1], rel=pp.TOLERANCE)


def test_all_messages_of_a_step_are_derived() -> None:
    """Evaluation sends activations alone."""
    from hpctrain.plan.pipeline.forwards import forwards

    for ranks, chunks, number in ((1, 1, 3), (2, 2, 5), (3, 1, 2), (3, 2, 7)):
        places = tuple(range(ranks)) * chunks
        orders = forwards(places, ranks, number)
        done = {(a.stage, a.micro_batch) for order in orders for a in order if isinstance(a, Forward)}
        assert done == {(s, i) for s in range(len(places)) for i in range(number)}
        assert with_messages(replace(schedule("gpipe", ranks, number, chunks=chunks), orders=tuple(
            tuple(a for a in order if isinstance(a, Forward)) for order in orders))) == orders
