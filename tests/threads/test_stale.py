"""Pipelines that update while micro-batches are under way follow the delayed update of the papers, to 1e-12."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pipeline_cases
import pipeline_parity as pp
import pytest
import stale_cases as sc
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpctrain
import hpctrain.numpy as n
from hpctrain.errors import ConfigError, NonFiniteError, UnsupportedError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.versions import versions
from hpctrain.runtime.pipeline_options import STALE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.stale import StaleTrainer
from hpctrain.runtime.step import Trainer

SIZES = [(1, 1), (2, 1), (3, 2), (4, 3), (2, 5), (3, 7), (4, 9)]


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize(("ranks", "number"), SIZES)
def test_it_is_the_delayed_update(name: str, ranks: int, number: int, rule: str) -> None:
    pp.on_threads(ranks, lambda context: sc.case(context, name, ranks, [number, number, 1 + number // 2], rule=rule))


@pytest.mark.parametrize("kind", ["torch", "other"])
@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize(("ranks", "number"), [(1, 3), (2, 5), (3, 7), (4, 9)])
def test_torch_stages(name: str, ranks: int, number: int, kind: str) -> None:
    pp.on_threads(ranks, lambda context: sc.case(context, name, ranks, [number, 2], kind=kind, rule="adamw"))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("name", "ranks", "size", "number", "rule", "kind"), [
    ("pipedream", 2, 4, 5, "adamw", "numpy"), ("pipedream", 3, 6, 7, "sgd", "torch"),
    ("pipedream-vertical", 2, 4, 4, "sgd", "numpy"), ("pipedream-2bw", 2, 4, 7, "sgd", "torch"),
    ("pipedream-2bw", 3, 6, 7, "adamw", "numpy"), ("pipedream", 1, 3, 4, "adamw", "numpy"),
])
def test_a_data_axis_beside_it(name: str, ranks: int, size: int, number: int, rule: str, kind: str, zero: int) -> None:
    pp.on_threads(size, lambda context: sc.case(context, name, ranks, [number, 1, number], rule=rule, zero=zero,
                                                kind=kind))


@pytest.mark.parametrize(("ranks", "per_update", "number"), [(1, 2, 5), (2, 1, 4), (2, 3, 7), (3, 2, 9), (4, 3, 7),
                                                             (4, 5, 3)])
def test_updates_of_other_sizes(ranks: int, per_update: int, number: int) -> None:
    pp.on_threads(ranks, lambda context: sc.case(context, "pipedream-2bw", ranks, [number, number],
                                                 per_update=per_update))




class Watched:
    """A stage that notes where its first parameter lies in each pass."""

    def __init__(self, model: Any) -> None:
        self._model, self.places = model, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _note(self) -> None:
        self.places.add(self._model.parameter(self._model.placements[0].name).ctypes.data)

    def forward(self, *args: Any, **how: Any) -> Any:
        self._note()
        return self._model.forward(*args, **how)

    def backward(self, *args: Any) -> Any:
        self._note()
        return self._model.backward(*args)


@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize(("ranks", "number"), [(1, 4), (2, 5), (3, 8), (4, 9), (4, 2)])
def test_as_many_versions_are_kept_as_planned(name: str, ranks: int, number: int) -> None:
    """Counted twice: the copies made, and the places where the passes found the weights."""
    kept = versions(schedule(name, ranks, number)).kept

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline(name), wrap=Watched, bounds=[*(0, 1, 3, 5)[:ranks], 8],
                          optimizer=hpctrain.SGD(lr=0.1))
        stage = made.model.models[context.rank]
        home = stage.parameter(stage.placements[0].name).ctypes.data
        for _ in range(3):
            made.step(pp.global_batch(number))
            assert made.num_versions == kept[context.rank]
            assert len(stage.places) == kept[context.rank] or number < ranks  # the last ones are used by nobody then
            assert stage.parameter(stage.placements[0].name).ctypes.data == home
        made.step(pp.global_batch(1))
        assert made.num_versions == kept[context.rank]
        rows = [line.split("  ") for line in made.memory_report().splitlines()]
        assert all(row[-1].strip() in ("+0.0 %", "-") for row in rows[1:-1])

    pp.on_threads(ranks, run)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(found=pipeline_cases.updating(), data=st.data())
def test_any_plan_with_several_updates(found: Any, data: Any) -> None:
    """Several stages on a rank, or none; backwards in two parts; updates of any micro-batches, at any time."""
    plan, groups, used = found
    stages, pipelines = len(plan.places), data.draw(st.integers(1, 2))
    zero = hpctrain.Zero(data.draw(st.integers(0, 1)), bucket_bytes=100)
    bounds = (0, *sorted(data.draw(st.lists(st.integers(0, 8), min_size=stages - 1, max_size=stages - 1))), 8)
    batches = sc.data(0, pipelines, plan.num_micro_batches)
    kind = data.draw(st.sampled_from(("numpy", "torch")))
    truth = sc.simulate(sc.twin(), sc.stage_of(bounds), lambda t, i, s: used[s][groups[t][i // pipelines]],
                        [[[mine[i] for i in group for mine in batches] for group in groups]] * 2, sc.RULES["sgd"][1])

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline(plan), kind, bounds, optimizer=sc.RULES["sgd"][0], zero=zero)
        sc.compare(sc.observe(made, kind, [batches] * 2), truth)
        assert made.num_updates == 2 * len(groups)

    pp.on_threads(plan.num_ranks * pipelines, run)


@pytest.mark.parametrize("rule", [*(ours for ours, _ in sc.RULES.values()), hpctrain.LAMB(lr=0.05)])
@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical"])
def test_on_one_rank_nothing_is_stale(name: str, rule: Any) -> None:
    """An update a micro-batch, as by the trainer of a whole model, bit by bit."""
    batches = pp.global_batch(6)
    plain = Trainer(pp.parity.context_of(pp.single()), n.network(pp.layers(tied=False), n.cross_entropy),
                    optimizer=rule)
    for batch in batches:
        plain.step([batch])
    made = sc.trainer(pp.parity.context_of(pp.single()), Pipeline(name), optimizer=rule)
    assert made.step(batches).update == 6
    for (name, weight), (_, other) in zip(made.parameters(), plain.parameters(), strict=True):
        np.testing.assert_array_equal(weight, other, err_msg=name)


def test_what_a_step_tells() -> None:
    """Each update has its learning rate; norm and gradients are of the last."""
    ours, rates = hpctrain.SGD(lr=0.3), hpctrain.WarmupLinear(warmup=3, total=20)
    batches = pp.global_batch(5)
    truth = sc.simulate(sc.twin(), sc.stage_of((0, 2, 5, 8)), sc.delayed("pipedream", 3),
                        [sc.grouped([batches], 1)] * 2, lambda ps: torch.optim.SGD(ps, lr=0.3),
                        lambda update: 0.3 * rates.factor(update, {}))

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline("pipedream"), bounds=(0, 2, 5, 8), optimizer=ours, schedule=rates)
        assert made.mesh == {"pipeline": 3, "data": 1} and made.num_stages == 3
        first, second = made.step(batches), made.step(batches)
        assert (first.update, second.update, first.skipped) == (5, 10, "")
        assert first.weight == sum(len(batch[1]) for batch in batches)
        assert second.lr == 0.3 * rates.factor(9, {})
        np.testing.assert_allclose([first.loss, second.loss], truth.losses, rtol=1e-12)
        squares = sum(float(np.sum(np.square(g))) for _, g in made.gradients())
        assert np.sqrt(sum(context.world.exchange(squares))) == pytest.approx(second.gradient_norm, rel=1e-12)
        assert len(made.trace()) == 3 * 2 * 5
        assert made.unused == frozenset()
        assert made.step([]).skipped == "no data" and made.num_updates == 10
        sc.compare(sc.Run([], {name: np.asarray(w) for name, w in made.parameters()}), sc.Run([], truth.weights))

    pp.on_threads(3, run)


@pytest.mark.parametrize("gone", [(1, 4), (2,), (0, 3)])
def test_an_update_that_weighs_nothing_is_left_out(gone: tuple[int, ...]) -> None:
    """In all stages and pipelines; older versions that are needed stay what they are."""
    def empty(batch: Any) -> Any:
        return batch[0][:0], batch[1][:0]

    steps = [[[empty(b) if i in gone else b for i, b in enumerate(mine)] for mine in sc.data(u, 2, 5)]
             for u in range(2)]
    left = [i for i in range(5) if i not in gone]
    applied = [sum(i < updates for i in left) for updates in range(5)]
    truth = sc.simulate(sc.twin(), sc.stage_of((0, 2, 5, 8)), lambda t, i, s: applied[max(0, left[t] - (2 - s))],
                        [[update for i, update in enumerate(sc.grouped(step, 1)) if i in left] for step in steps],
                        sc.RULES["sgd"][1])

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline("pipedream", 3), "torch", (0, 2, 5, 8), optimizer=sc.RULES["sgd"][0])
        sc.compare(sc.observe(made, "torch", steps), truth)
        assert made.num_updates == 2 * len(left)
        nothing = made.step(sc.as_torch([empty(b) for b in steps[0][made.rank]]))
        assert nothing.skipped == "no data" and made.num_updates == 2 * len(left)

    pp.on_threads(6, run)


@pytest.mark.parametrize("zero", [0, 1])
def test_masters_of_another_type(zero: int) -> None:
    pp.on_threads(4, lambda context: sc.case(
        context, "pipedream", 2, [5, 4], zero=zero, tolerance=2e-5,
        precision=hpctrain.Precision(compute="float32", master="float64", accumulate="float64")))


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize("zero", [0, 1])
def test_it_resumes(tmp_path: Any, name: str, zero: int) -> None:
    """On the same stages as if nothing had been; another schedule finds the same weights."""
    ours, theirs = sc.RULES["adamw"]
    steps = [sc.data(u, 2, 5) for u in range(3)]
    size = 2 if name == "pipedream-2bw" else 1
    truths = [sc.simulate(sc.twin(), sc.stage_of((0, 4, 8)), sc.delayed(name, 2),
                          [sc.grouped(s, size) for s in steps[:k]], theirs) for k in (2, 3)]
    how = {"optimizer": ours, "zero": hpctrain.Zero(zero, bucket_bytes=100)}

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline(name, 2), **how)
        sc.compare(sc.observe(made, "numpy", steps[:2]), truths[0])
        made.save(tmp_path)
        again = sc.trainer(context, Pipeline(name, 2), **how)
        again.resume(tmp_path, policy="require")
        assert again.num_updates == made.num_updates
        mine = sc.observe(again, "numpy", steps[2:])
        sc.compare(mine, sc.Run(truths[1].losses[2:], truths[1].weights))

    def flushed(context: Any) -> None:
        other = pp.pipelined(context, Pipeline("1f1b"), make=lambda: pp.layers(tied=False), optimizer=ours)
        other.resume(tmp_path, policy="require")
        sc.compare(sc.Run([], {name: np.asarray(w) for name, w in other.parameters()}),
                   sc.Run([], truths[0].weights))

    pp.on_threads(4, run)
    pp.on_threads(3, flushed)


# What is not finite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1])
def test_what_is_not_finite_ends_the_step_on_all_ranks_alike(tmp_path: Any, zero: int) -> None:
    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline("pipedream", 2), optimizer=hpctrain.SGD(lr=0.1),
                          zero=hpctrain.Zero(zero, bucket_bytes=100))
        batches = sc.data(0, 2, 4)[made.rank]
        made.step(batches)
        made.save(tmp_path)
        with made.gathered(modify=0) as model:
            if made.rank == 0 and "1.bias" in {p.name for p in model.placements}:
                model.parameter("1.bias")[0] = np.nan
        with pytest.raises(NonFiniteError, match="update 1 of 4 in this step is not finite: "):
            made.step(batches)
        for call in (lambda: made.step(batches), lambda: made.save(tmp_path)):
            with pytest.raises(NonFiniteError, match="legal is resume"):
                call()
        made.resume(tmp_path)
        assert made.step(batches).update == 8

    pp.on_threads(4, run)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_alone_that_is_not_finite(zero: int) -> None:
    """The parameter, the update and the rank are told."""
    class Breaks(Watched):
        def backward(self, stash: Any, grads: Any, deliver: Any, scale: float) -> Any:
            def spoiled(name: str, gradient: Any) -> None:
                broken = name == "1.bias" and next(calls) == 4
                deliver(name, np.full_like(gradient, np.inf) if broken else gradient)

            return self._model.backward(stash, grads, spoiled, scale)

    calls = iter(range(100))

    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline("pipedream", 2), wrap=Breaks, optimizer=hpctrain.SGD(lr=0.1),
                          zero=hpctrain.Zero(zero, bucket_bytes=100))
        with pytest.raises(NonFiniteError, match=r"rank [01], update 3 of 5 in this .*: the gradient of '1.bias'"):
            made.step(sc.data(0, 2, 5)[made.rank])

    pp.on_threads(4, run)


def test_after_an_error_within_a_step_only_a_checkpoint_will_do(tmp_path: Any) -> None:
    """On one rank a user may catch it: some updates are made then, and the newest weights anywhere."""
    made = sc.trainer(pp.parity.context_of(pp.single()), Pipeline("pipedream-2bw"), optimizer=hpctrain.SGD())
    made.save(tmp_path)
    batches = pp.global_batch(4)
    before = made.evaluate(batches)
    with pytest.raises(IndexError):
        made.step([*batches, (batches[0][0] + 7, batches[0][1])])
    with pytest.raises(NonFiniteError, match="a step ended in an error"):
        made.step(batches)
    made.resume(tmp_path)
    assert made.evaluate(batches) == before
    assert made.step(batches).update == 4


def test_ignored() -> None:
    def run(context: Any) -> None:
        made = sc.trainer(context, Pipeline("pipedream"), optimizer=hpctrain.SGD(lr=0.1), non_finite="ignore")
        with made.gathered(modify=0) as model:
            if context.rank == 0:
                model.parameter("1.bias")[0] = np.nan
        result = made.step(pp.global_batch(3))
        assert np.isnan(result.loss) and (result.update, result.skipped) == (3, "")

    pp.on_threads(2, run)


# What is refused -----------------------------------------------------------------------------------------------------


def test_what_would_need_a_flush_is_refused_on_all_ranks() -> None:
    half = {"precision": hpctrain.Precision(compute="float16", master="float32", accumulate="float32")}

    def run(context: Any) -> None:
        for how, text in (({"clip_norm": 1.0}, r"clip_norm = 1.0 with the schedule 'pipedream'.*legal is None"),
                          ({"non_finite": "skip"}, "non_finite = 'skip' .* legal is 'stop' or 'ignore'"),
                          ({"loss_scale": hpctrain.LossScale()}, "loss_scale = .* legal is None"),
                          ({"zero": hpctrain.Zero(2)}, "zero.stage = 2"),
                          ({"zero": hpctrain.Zero(1, offload=hpctrain.Offload(delay=True))}, "zero.offload"),
                          (half, "float16 with .* legal are 'bfloat16', 'float32' or 'float64'")):
            with pytest.raises(UnsupportedError, match=text):
                sc.trainer(context, Pipeline("pipedream", 2), **{"optimizer": hpctrain.SGD(), **how})
        with pytest.raises(UnsupportedError, match=r"'0.weight' is in stages on several ranks.*'pipedream-2bw'"):
            tied = pp.layers()
            StaleTrainer(context, lambda s: n.stage(tied, n.cross_entropy, (0, 4, 8), s), Pipeline("pipedream-2bw", 2),
                         optimizer=hpctrain.SGD())
        made = sc.trainer(context, Pipeline("pipedream", 2), optimizer=hpctrain.SGD())
        with pytest.raises(ConfigError, match=r"2 micro-batches on rank 0, 3 on rank 1: .*'pipedream' .*same number"):
            made.step(pp.global_batch(2 + context.rank % 2))
        assert made.evaluate(pp.global_batch(2 + made.rank)).weight > 0
        assert made.step(pp.global_batch(3)).update == 3
        two = replace(schedule("dualpipe", 4, 4), weights="stash")
        with pytest.raises(UnsupportedError, match="'dualpipe' has 2 copies of the model, .* legal is one copy"):
            StaleTrainer(context, lambda s: None, Pipeline(two), optimizer=hpctrain.SGD())
        with pytest.raises(UnsupportedError, match="weights other than 'one'"):
            PipelineTrainer(context, [], Pipeline("pipedream"), optimizer=hpctrain.SGD())

    pp.on_threads(4, run)
