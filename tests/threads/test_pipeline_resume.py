"""Checkpoints of pipelines go on with any other layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest

import hpctrain
import hpctrain.numpy as n
from hpctrain.runtime.pipeline_options import Pipeline


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
