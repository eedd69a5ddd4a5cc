"""A run whose model is cut into stages: how its trainer is made, described, and what one step of it looked like.

Owns the pipeline's part of a session. What the config means is in `pipeline`, what the stages are in `staged`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.config.records import Config
from hpctrain.plan.pipeline.partition import Layer
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.trace import to_chrome
from hpctrain.train.pipeline import Pipelining, cut, layer_costs, with_times
from hpctrain.train.staged import make_staged

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context
    from hpctrain.runtime.pipeline_trainer import PipelineTrainer

__all__ = ["Pipelined", "make_pipelined"]


@dataclass(frozen=True)
class Pipelined:
    """The trainer of a cut model, and where it is cut."""

    context: Context
    trainer: PipelineTrainer
    bounds: tuple[int, ...]
    num_micro_batches: int

    def describe(self) -> list[str]:
        """What is about to run, for people."""
        timeline = simulate(self.trainer.plan(self.num_micro_batches))
        mesh = " x ".join(f"{axis} {length}" for axis, length in self.trainer.mesh.items())
        sizes = ", ".join(str(stop - start) for start, stop in pairwise(self.bounds))
        return [f"mesh {mesh}; {timeline.plan.name} with {self.num_micro_batches} micro-batches, bubble "
                f"{100 * timeline.bubble_of_ideal:.1f} % of the ideal time if all stages take equal times; layers of "
                f"the stages: {sizes}"]

    def write_trace(self, path: Path, num_micro_batches: int) -> str:
        """Writes the last step of rank 0's pipeline, planned with its own times and real. Collective over the world.

        Returns:
            The line to show.
        """
        spans = self.trainer.trace()

        def write() -> str:
            if not num_micro_batches:
                return f"no {path}: that step had no data on the first pipeline"
            plan = self.trainer.plan(num_micro_batches)
            timeline = simulate(plan, Times.measured(spans, len(plan.places)))
            planned = [span for row in timeline.spans for span in row]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_chrome({f"planned {plan.name}": planned, f"real {plan.name}": spans}))
            real, ideal = max(span.stop for span in spans), float(timeline.makespan)
            return (f"trace        {path}: {1e3 * real:.4g} ms; planned {1e3 * ideal:.4g} ms, with the same times of "
                    "the stages and messages that take none")

        text: str = self.context.world.on_root(write)
        return text


def make_pipelined(config: Config, context: Context, pipeline: Pipelining, sample: Any,
                   options: Mapping[str, Any]) -> tuple[Pipelined, Callable[[Any], Any]]:
    """Cuts the model and makes its trainer. Collective over the world.

    Args:
        config: what to run.
        context: the job.
        pipeline: what the config says of the pipeline.
        sample: samples of one micro-batch, for pipeline.layers = "time"; rank 0 measures for all.
        options: of the trainer.

    Returns:
        The pipeline, and what turns samples into the model's micro-batch.
    """
    world, how = context.world, pipeline.options
    with world.agree():
        staged = make_staged(config)
        layers = layer_costs(config)
    if config.pipeline.layers == "time":
        context.limit_threads(staged.arrays)
        costs = world.on_root(lambda: [astuple(cost) for cost in staged.profile(staged.micro_batch(sample))])
        layers = [Layer(*cost) for cost in costs]
    with world.agree():
        bounds = cut(config, pipeline.plan.depth, layers)
        if config.pipeline.layers == "time":
            how = with_times(how, layers, bounds)
    trainer = context.pipeline(lambda number: staged.stage(bounds, number), how,
                               trace=config.pipeline.trace is not None, **options)
    return Pipelined(context, trainer, bounds, pipeline.plan.num_micro_batches), staged.micro_batch
