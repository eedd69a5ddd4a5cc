"""Troubles that trainers of pipelines are known for, each as a small case with numbers worked out by hand."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest
import stage_cases
import torch
from torch import nn

import hpctrain
import hpctrain.numpy as n
from hpctrain.checkpoint import find
from hpctrain.errors import NonFiniteError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.partition import uniform
from hpctrain.plan.pipeline.stash import stage_peaks
from hpctrain.plan.schedule import Backward, BackwardWeight, Forward
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer

INTERLEAVED = Pipeline("interleaved", chunks=2)


# What goes from stage to stage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_any_nest_arrives_as_it_was_and_its_gradient_comes_back(name: str, size: int) -> None:
    """Masks and integers in their own types, parts added, left out or used by nobody, targets in the middle."""
    task = stage_cases.nests()
    batches = [stage_cases.numbered([3, 3, 2], update) for update in range(2)]
    task.check(size, Pipeline(name), batches, pp.observe(task.whole(), batches))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pipeline", [Pipeline("1f1b"), INTERLEAVED], ids=lambda p: p.schedule)
def test_lengths_that_change_within_a_batch_and_from_step_to_step(pipeline: Pipeline, size: int) -> None:
    """Each micro-batch meets its own targets (`stage_cases.nests` looks), nothing is cut, tokens are the weight."""
    lengths = [5, 9, 9, 3], [12, 1, 7, 7]
    nests, gpt = stage_cases.nests(), stage_cases.small_gpt()
    of_nests = [stage_cases.numbered(of, update) for update, of in enumerate(lengths)]
    of_gpt = [[(tokens[None], targets[None]) for tokens, targets, _ in batch] for batch in of_nests]
    for task, batches in ((nests, of_nests), (gpt, of_gpt)):
        task.check(size, pipeline, batches, pp.observe(task.whole(), batches))

    def run(context: Any) -> None:
        trainer = nests.pipelined(context, pipeline)
        assert [trainer.step(batch).weight for batch in of_nests] == [26, 27]

    pp.on_threads(size, run)


# Numbers that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pipeline", [Pipeline("gpipe"), Pipeline("1f1b"), INTERLEAVED], ids=lambda p: p.schedule)
def test_fewer_micro_batches_than_stages(pipeline: Pipeline, number: int) -> None:
    plan = pipeline.plan(4, number)
    for kinds in (Forward, Backward | BackwardWeight):
        done = Counter((a.stage, a.micro_batch) for order in plan.orders for a in order if isinstance(a, kinds))
        assert done == {(stage, i): 1 for stage in range(len(plan.places)) for i in range(number)}
    pp.check(4, pipeline, number)


def tiny_layers(number: int) -> list[Any]:
    generator = np.random.default_rng(1)
    first = n.Linear(n.Parameter(generator.normal(size=(2, pp.LENGTH))))
    more = [n.Linear(n.Parameter(generator.normal(size=(2, 2)) / 2 + np.eye(2))) for _ in range(number - 2)]
    return [first, *more, n.Linear(n.Parameter(generator.normal(size=(pp.VOCAB, 2))))]


@pytest.mark.parametrize(("number", "sizes"), [(30, [8, 8, 7, 7]), (3, [1, 1, 1, 0])])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_layers_that_do_not_divide(name: str, number: int, sizes: list[int]) -> None:
    """No layer vanishes; a stage without one passes on what it gets."""
    bounds = uniform(number, 4)
    assert sorted(np.diff(bounds), reverse=True) == sizes
    batches = [pp.global_batch(5, update) for update in range(2)]
    truth = pp.alone(batches, tiny_layers(number))
    seen = pp.on_threads(4, lambda context: pp.case(context, truth, Pipeline(name), batches, bounds=bounds,
                                                    make=lambda: tiny_layers(number)))
    assert [len(s.weights) for s in seen] == np.diff(bounds).tolist()
    assert sum(w.size for s in seen for w in s.weights.values()) == 2 * pp.LENGTH + 4 * (number - 2) + 2 * pp.VOCAB


def test_seventy_layers_on_twelve_stages() -> None:
    assert Counter(np.diff(uniform(70, 12)).tolist()) == {6: 10, 5: 2}


# Gradients -----------------------------------------------------------------------------------------------------------


class Times(nn.Module):
    """x -> weight * x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def products(weigh: Any) -> stage_cases.Task:
    """Two factors of 1; the gradient of each is the sum of a micro-batch."""
    return stage_cases.Task(lambda: nn.Sequential(Times(), Times()), lambda y, batch: (y.sum(), weigh(batch)))


def rows(*micro_batches: tuple[float, ...]) -> list[Any]:
    return [(torch.tensor(x, dtype=torch.float64),) for x in micro_batches]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_accumulated_gradients_survive_a_change_of_length(name: str) -> None:
    """1 and 3, then 5 and 7: 4; not 3.5 (scaled twice), nor 3 (the last ones alone)."""
    def run(context: Any) -> None:
        trainer = products(lambda batch: 1.0).pipelined(context, Pipeline(name))
        trainer.step(rows((1,), (3,), (2.5, 2.5), (1, 2, 4)))
        assert [gradient.tolist() for _, gradient in trainer.gradients()] == [[4.0]]

    pp.on_threads(2, run)


def test_a_sum_over_tokens_and_a_validation_loss_do_not_know_micro_batches() -> None:
    task = products(lambda batch: float(len(batch[0])))
    x = [0.5 * i for i in range(12)]
    cuts = [[0, 12], [0, 6, 12], [0, 2, 6, 11, 12], [0, 1, 2, 3, 12]]
    batches = [rows(*(tuple(x[a:b]) for a, b in pairwise(cut))) for cut in cuts]
    whole = task.whole(clip_norm=None, optimizer=hpctrain.SGD(lr=0.0))
    assert whole.step(batches[0]).weight == 12
    gradients = {name: float(gradient) for name, gradient in whole.gradients()}

    def run(context: Any) -> None:
        trainer = task.pipelined(context, Pipeline("1f1b"), clip_norm=None, optimizer=hpctrain.SGD(lr=0.0))
        for batch in batches:
            assert trainer.step(batch).loss == trainer.evaluate(batch).loss == 2.75
            for name, gradient in trainer.gradients():
                assert float(gradient) == gradients[name] == 2.75

    pp.on_threads(2, run)


class First(nn.Module):
    """(a, b) -> (weight * a, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight * x[0], x[1]


class Last(First):
    """(c, b) -> c + weight * b."""

    def forward(self, x: Any) -> torch.Tensor:
        return x[0] + self.weight * x[1]


def tied_ends() -> stage_cases.Task:
    """One weight at both ends; its gradient from the first is a, from the last b."""
    def make() -> nn.Module:
        made = nn.Sequential(First(), nn.Identity(), nn.Identity(), Last())
        made[3].weight = made[0].weight
        return made

    return stage_cases.Task(make, lambda y, batch: (y.sum(), 1.0))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tied_embedding_on_two_stages_and_two_pipelines(tmp_path: Any, stage: int) -> None:
    """1 and 3 from the embedding, 10 and 20 from the head: 17 in every copy; not 16, nor 22."""
    task, zero = tied_ends(), hpctrain.Zero(stage, bucket_bytes=100)
    generator = np.random.default_rng(3)
    batches = [rows((1, 10), (3, 20)), *(rows(*generator.normal(size=(2, 2)).tolist()) for _ in range(20))]
    whole = task.whole()
    losses = [whole.step(batch).loss for batch in batches]

    def train(context: Any) -> np.ndarray:
        trainer = task.pipelined(context, Pipeline("1f1b", 2), zero=zero)
        mine = pp.share(batches, trainer)
        assert trainer.step(mine[0]).gradient_norm == 17  # counted once
        assert [gradient.tolist() for _, gradient in trainer.gradients()] == [[17]]
        for batch in mine[1:20]:
            trainer.step(batch)
        trainer.save(tmp_path)
        saved = find(tmp_path, context.world, must_exist=True)
        assert saved is not None and saved.user["aliases"] == {"0.weight": ["3.weight"]}
        assert set(saved.tensors) == {"0.weight", "optim.exp_avg.0.weight", "optim.exp_avg_sq.0.weight"}
        assert [(piece.start, piece.stop) for piece in saved._pieces["0.weight"]] == [(0, 1)]  # once
        return np.asarray(dict(trainer.parameters())["0.weight"]).copy()

    copies = pp.on_threads(4, train)
    assert all(np.array_equal(copy, copies[0]) for copy in copies)

    def go_on(context: Any) -> float:
        trainer = task.pipelined(context, Pipeline("1f1b"), zero=zero)
        trainer.resume(tmp_path, policy="require")
        assert all(np.array_equal(np.asarray(value), copies[0]) for _, value in trainer.parameters())
        return trainer.step(batches[20]).loss

    for ranks in (1, 4):
        np.testing.assert_allclose(pp.on_threads(ranks, go_on), losses[20], rtol=pp.TOLERANCE)


# What all ranks know -------------------------------------------------------------------------------------------------


def test_every_rank_is_told_the_finished_loss() -> None:
    batches = [pp.global_batch(4, update) for update in range(2)]
    truth = pp.truth(4)

    def run(context: Any) -> Any:
        trainer = pp.pipelined(context, Pipeline("1f1b"))
        steps = [trainer.step(batch) for batch in batches]
        return [step.loss for step in steps], [step.weight for step in steps], trainer.evaluate(batches[0])

    told = pp.on_threads(3, run)
    assert told[0] == told[1] == told[2]
    np.testing.assert_allclose(told[0][0], truth.losses, rtol=pp.TOLERANCE)
    np.testing.assert_allclose(told[0][2].loss, truth.evaluated, rtol=pp.TOLERANCE)


class Poisoned:
    """A stage in which a micro-batch (inputs, targets, "gradient") or (..., "loss") brings what is not finite."""

    def __init__(self, model: Any, stage: int) -> None:
        self._model, self._last = model, stage == 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, inputs: Any = None, *, training: bool = True) -> Any:
        outputs, stash = self._model.forward(batch, inputs, training=training)
        if self._last and batch[2:] == ("loss",):
            outputs = float("nan"), outputs[1]
        return outputs, (stash, batch)

    def backward(self, stash: Any, grads: Any, deliver: Any, scale: float = 1.0) -> Any:
        kept, batch = stash

        def poison(name: str, gradient: Any) -> None:
            if self._last and batch[2:] == ("gradient",) and name == "5.weight":
                gradient[0, 1] = np.inf
            deliver(name, gradient)

        return self._model.backward(kept, grads, poison, scale)


def poisoned(context: Any, **options: Any) -> PipelineTrainer:
    layers = pp.layers()
    return PipelineTrainer(context, lambda s: Poisoned(n.stage(layers, n.cross_entropy, (0, 4, 8), s), s),
                           Pipeline("1f1b", 2), **pp.options(**options))


def marked(batch: list[Any], mark: str) -> list[Any]:
    """The last micro-batch is marked: that is the second one of the second pipeline."""
    return [*batch[:-1], (*batch[-1], mark)]


def test_what_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    """An inf in a gradient of stage 1 of pipeline 1, then a NaN in its loss: nobody updates, the rank is named."""
    good = [pp.global_batch(4, update) for update in range(5)]
    batches = [*good[:2], marked(good[0], "gradient"), good[2], marked(good[1], "loss"), *good[3:]]
    truth = pp.alone(good, pp.layers(), schedule=hpctrain.WarmupLinear(2, 9))
    told = r"update 3: .*\(rank 3, micro-batch 1: the loss is nan\), step skipped on all ranks \(1 in a row\)"

    def run(context: Any) -> Any:
        trainer = poisoned(context, loss_scale=hpctrain.LossScale(hysteresis=1),
                           schedule=hpctrain.WarmupLinear(2, 9))
        results, weights = [], []
        for batch in pp.share(batches, trainer):
            results.append(trainer.step(batch))
            weights.append({name: np.array(value) for name, value in trainer.parameters()})
        for bad in (2, 4):
            assert all(np.array_equal(weights[bad][name], value) for name, value in weights[bad - 1].items())
            assert results[bad].update == results[bad - 1].update
        return [(r.loss_scale, r.skipped, r.lr, r.gradient_norm) for r in results], [r.loss for r in results]

    with pytest.warns(UserWarning, match=told):
        seen = pp.on_threads(4, run)
    np.testing.assert_equal(seen, [seen[0]] * 4)
    numbers, losses = seen[0]
    scales, skipped, rates, _ = zip(*numbers, strict=True)
    assert scales == (2.0**16, 2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**14)
    assert [bool(why) for why in skipped] == [False, False, True, False, True, False, False]
    assert rates[2] == rates[3] and rates[4] == rates[5]
    np.testing.assert_allclose([losses[i] for i in (0, 1, 3, 5, 6)], truth.losses, rtol=pp.TOLERANCE)


@pytest.mark.parametrize(("mark", "words"), [("gradient", "the gradient of '5.weight'"), ("loss", "the loss is nan")])
def test_all_stop_where_the_policy_says_so(mark: str, words: str) -> None:
    def run(context: Any) -> None:
        trainer = poisoned(context, non_finite="stop")
        (batch,) = pp.share([marked(pp.global_batch(4), mark)], trainer)
        began = time.monotonic()
        with pytest.raises(NonFiniteError, match=f"rank 3, micro-batch 1: {words}"):
            trainer.step(batch)
        assert time.monotonic() - began < 10
        assert trainer.peaks == {context.rank // 2: schedule_peak(context.rank // 2)}  # not those of the search

    def schedule_peak(stage: int) -> Any:
        return stage_peaks(schedule("1f1b", 2, 2))[stage]

    pp.on_threads(4, run)
