"""The trainer of a model that is cut into stages: the step of `runtime.step` with the passes of a schedule.

Owns what only a pipeline can tell: its plan, its peaks, its trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.stash import Peak
from hpctrain.plan.pipeline.trace import Span
from hpctrain.plan.schedule import from_symbol, symbol
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipelined import Pipelined, PipelinePasses, StageModels
from hpctrain.runtime.step import Trainer

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["PipelineTrainer"]


class PipelineTrainer(Trainer):
    """Trains a model over a pipeline axis and a data axis. Collective over the world to make.

    A step is that of one process: loss, norm, clipping, skipping and loss scale are of the whole model and the whole
    batch. `step` and `evaluate` get the same micro-batches on all ranks of a pipeline. `gradients`, `parameters` and
    `gathered` are about the stages of this rank, and collective over the ranks that hold the same ones: its data axis,
    or those of all its places along the pipeline where the model is there in copies (`gathered(modify=...)` counts the
    ranks of the first place first). Stages that have a parameter of the same name share it: its gradient is the sum
    over them (who changes one by `gathered` changes all copies alike).

    Args:
        context: the job.
        stages: the Models of all stages in order, or a function that makes one by its number and is called for this
            rank's stages only. Parameters have the names that they have in the whole model.
        pipeline: schedule and ranks.
        options: those of `TrainerOptions`; zero.stage may be 0 or 1.

    Raises:
        ConfigError, UnsupportedError: options that do not go together.
        PlanError: the schedule cannot be run; nothing ran.
    """

    _pipelined_by: ClassVar[type[Pipelined]] = Pipelined

    def __init__(self, context: Context, stages: StageModels, pipeline: Pipeline, *, trace: bool = False,
                 **options: Any) -> None:
        self._pipelined = self._pipelined_by(context.world, stages, pipeline)
        super().__init__(context, self._pipelined.model, parallel=self._pipelined, **options)
        assert isinstance(self._passes, PipelinePasses)
        self._run = self._passes.run
        self._run.aligned = trace

    @property
    def rank(self) -> int:
        """This rank on the data axis: which part of the data its pipeline is for."""
        return self._pipelined.data_rank

    @property
    def mesh(self) -> Mapping[str, int]:
        """The lengths of the axes "pipeline" and "data"."""
        return self._pipelined.mesh

    @property
    def num_stages(self) -> int:
        """Stages of the model; copies count once."""
        return self._pipelined.depth

    @property
    def peaks(self) -> Mapping[int, Peak]:
        """For each stage of this rank the most micro-batches that it held at one time in the last step, as counted."""
        return dict(self._run.peaks)

    def plan(self, num_micro_batches: int) -> PipelinePlan:
        """The proved plan of a step of so many micro-batches. Local."""
        return self._pipelined.plan(num_micro_batches)

    def trace(self) -> tuple[Span, ...]:
        """What ran when on all ranks of this rank's pipeline in the last step. Collective over the world.

        Times are in seconds since the step began. With the option `trace` all ranks begin it at the same moment, which
        costs a barrier a step; otherwise each counts from its own beginning.
        """
        mine = [(symbol(span.action, stages=True), float(span.start), float(span.stop)) for span in self._run.spans]
        return tuple(Span(rank, from_symbol(text, None), start, stop)
                     for rank, spans in enumerate(self._pipelined.pipeline.exchange(mine))
                     for text, start, stop in spans)
