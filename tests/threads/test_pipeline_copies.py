"""Schedules with two copies of the model: whose parameters are one, what a user sees of it, plans of a user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pipeline_parity as pp
import pytest

import hpctrain
import hpctrain.numpy as n
from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.text import from_text
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer

SAME_WAY = """
schedule two copies in one direction
stages 0 1 0 1
copies 2
micro-batches 3
rank 0: 0F0 2F2 0F1 2B2 0B0 0B1
rank 1: 1F0 1B0 3F2 1F1 3B2 1B1
"""
LOPSIDED = """
schedule a copy over two ranks and one on a third
stages 0 1 2 2
copies 2
micro-batches 3
rank 0: F0 F1 I0 W0 B1
rank 1: F0 B0 F1 B1
rank 2: 2F2 3F2 3B2 2B2
"""


@pytest.mark.parametrize(("text", "size"), [(SAME_WAY, 2), (SAME_WAY, 4), (LOPSIDED, 3), (LOPSIDED, 6)])
@pytest.mark.parametrize("tied", [True, False])
def test_plans_of_a_user_with_two_copies(text: str, size: int, tied: bool) -> None:
    """Copies whose ranks hold other cuts of the model share each parameter all the same."""
    plan = from_text(text)
    batches = [[*pp.global_batch(3, u), *pp.global_batch(3, u)][: 3 * size // plan.num_ranks] for u in range(3)]
    how = {"zero": hpctrain.Zero(1, bucket_bytes=100)}
    expected = pp.alone(batches, pp.layers(tied), **how)
    seen = pp.on_threads(size, lambda context: pp.case(context, expected, Pipeline(plan), batches,
                                                       make=lambda: pp.layers(tied), **how))
    for parameter in expected.weights:
        copies = [s.weights[parameter] for s in seen if parameter in s.weights]
        assert len(copies) >= size // plan.num_ranks
        assert all(np.array_equal(copies[0], copy) for copy in copies)


def test_two_copies_are_one_model_with_a_data_axis_beside_it() -> None:
    """What a user sees of two copies: stages of the model, the mesh, the rank that says which data to read."""
    def run(context: Any) -> None:
        asked: list[int] = []

        def stage(s: int) -> Any:
            asked.append(s)
            return n.stage(pp.layers(), n.cross_entropy, (0, 3, 5, 8), s)

        trainer = PipelineTrainer(context, stage, Pipeline("dualpipe", 3), **pp.options())
        place, trainer_rank = divmod(context.rank, 2)
        assert asked == [[0, 2], [1], [0, 2]][place]
        assert (trainer.rank, trainer.num_stages, trainer.mesh) == (trainer_rank, 3, {"pipeline": 3, "data": 2})
        with trainer.gathered(modify=1) as model:  # the ranks of both ends are one group, numbered in their order
            if context.rank in (1, 3):
                for name in ("1.bias", "3.bias"):
                    if name in [p.name for p in model.placements]:
                        model.parameter(name)[...] = 7
        values = dict(trainer.parameters())
        assert all((values[name] == 7).all() for name in ("1.bias", "3.bias") if name in values)

    pp.on_threads(6, run)


def test_a_plan_with_another_number_of_copies_is_refused() -> None:
    def function(ranks: int, number: int) -> Any:
        return schedule("dualpipe", ranks, number) if number < 2 else schedule("gpipe", ranks, number, chunks=2)

    trainer = pp.pipelined(pp.parity.context_of(pp.single()), Pipeline(function))
    trainer.step(pp.global_batch(1))
    with pytest.raises(ConfigError, match="puts 2 stages on ranks .* but the models are 1 stages"):
        trainer.step(pp.global_batch(2))
