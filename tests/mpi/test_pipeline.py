"""Pipelines over MPI equal one process; messages of every kind; run with 1 to 4 ranks."""

from __future__ import annotations

import shutil
import tempfile

import numpy as np
import pipeline_parity as pp
import pytest
import stale_cases as sc

import hpctrain
from hpctrain.errors import NonFiniteError
from hpctrain.runtime.pipeline_options import RUNNABLE, STALE, Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.stale import StaleTrainer
from hpctrain.runtime.step import Trainer


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("number", [2, 7])
def test_every_schedule_equals_one_process(name: str, number: int) -> None:
    batches = [pp.global_batch(number, u) for u in range(2)]
    pp.case(hpctrain.start(), pp.alone(batches, pp.layers()), Pipeline(name), batches)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("dualpipe", None)])
def test_a_data_axis_beside_it(name: str, chunks: int | None, stage: int) -> None:
    context = hpctrain.start()
    batches = [pp.global_batch(5, u) for u in range(3)]
    ranks = 2 if context.size % 2 == 0 else 1
    seen = pp.case(context, pp.alone(batches, pp.layers()), Pipeline(name, ranks, chunks=chunks), batches,
                   zero=hpctrain.Zero(stage, bucket_bytes=100))
    bits = [b for b in context.world.exchange([float(x) for x in seen.weights.get("0.weight", ())]) if b]
    assert all(b == bits[0] for b in bits)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", STALE)
def test_stale_schedules_are_the_delayed_update(name: str, zero: int) -> None:
    context = hpctrain.start()
    sc.case(context, name, context.size, [6, 1], kind="torch", rule="adamw", zero=zero)
    if context.size % 2 == 0:
        sc.case(context, name, context.size // 2, [5, 4], zero=zero)


def test_the_context_makes_the_trainer_that_a_schedule_takes() -> None:
    context = hpctrain.start()
    layers = pp.layers(tied=False)
    for name, kind in (("pipedream", StaleTrainer), ("1f1b", PipelineTrainer)):
        made = context.pipeline(lambda s: pp.n.stage(layers, pp.n.cross_entropy, pp.uniform(8, context.size), s),
                                Pipeline(name), optimizer=hpctrain.SGD())
        assert type(made) is kind


def test_larger_messages() -> None:
    """Large enough for MPI to wait for the receiver."""
    context = hpctrain.start()
    n, width = pp.n, 300

    def make() -> list[object]:
        generator = np.random.default_rng(1)
        return [n.Linear(n.Parameter(generator.normal(size=(width, width)) / width)) for _ in range(4)]

    generator = np.random.default_rng(2)
    batches = [[tuple(generator.normal(size=(2, 400, width))) for _ in range(4)] for _ in range(2)]
    truth = pp.observe(Trainer(pp.parity.context_of(pp.single()), n.network(make(), n.squared_error), **pp.options()),
                       batches)
    trainer = PipelineTrainer(
        context, lambda s: n.stage(make(), n.squared_error, pp.uniform(4, context.size), s), Pipeline("1f1b"),
        **pp.options())
    pp.compare(pp.observe(trainer, batches), truth)


def test_what_is_not_finite_is_named() -> None:
    context = hpctrain.start()
    trainer = pp.pipelined(context, Pipeline("zb-h1"), non_finite="stop")
    with trainer.gathered(modify=0) as model:
        if context.rank == context.size - 1:
            model.parameter("0.weight")[3] = np.nan  # of the last layer
    batch = [(np.zeros((1, pp.LENGTH), int), np.array([i])) for i in range(2)]
    with pytest.raises(NonFiniteError, match=f"rank {context.size - 1}, micro-batch 0: the loss is"):
        trainer.step(batch)


def test_save_and_resume() -> None:
    context = hpctrain.start()
    where = context.world.broadcast_value(tempfile.mkdtemp() if context.rank == 0 else None)
    batches = [pp.global_batch(4, u) for u in range(3)]
    truth = pp.alone(batches, pp.layers())
    trainer = pp.pipelined(context, Pipeline("1f1b"))
    for batch in batches[:2]:
        trainer.step(batch)
    trainer.save(where)
    other = pp.pipelined(context, Pipeline("zb-v"))
    other.resume(where, policy="require")
    assert other.step(batches[2]).loss == pytest.approx(truth.losses[2], rel=pp.TOLERANCE)
    context.world.barrier()
    if context.rank == 0:
        shutil.rmtree(where)
