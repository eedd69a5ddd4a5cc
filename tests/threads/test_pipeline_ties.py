"""Parameters that several stages have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest

import hpctrain.numpy as n
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer


def test_unused() -> None:
    """A tied parameter that a backward reached is none of the unused ones."""
    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline("zb-v"))
        trainer.step(pp.global_batch(2))
        assert trainer.unused == frozenset()

    pp.on_threads(2, run)


@pytest.mark.parametrize(("name", "size"), [("1f1b", 2), ("interleaved", 2), ("zb-v", 6), ("dualpipe", 2),
                                            ("dualpipe", 6)])
def test_copies_begin_with_the_values_of_the_first_stage(name: str, size: int) -> None:
    """Also where two stages of one rank have their own copies."""
    expected = pp.truth(4)
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
