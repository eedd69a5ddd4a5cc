"""The trainer of a pipeline without a flush: several updates a step, from gradients of older weights.

    step                 pipedream, 2 ranks, 3 micro-batches      between steps the pipe is empty, and all stages have
    F0 F1 B0 U F2 B1 U B2 U                                       made the same updates: save, resume and evaluate are
       F0 B0 U F1 B1 U F2 B2 U                                    those of any trainer; staleness begins anew each time

Another trajectory than that of one process (docs/pipelines.md). The gradient of an update is that of (sum of its
micro-batches' loss terms) / (their weight), over all pipelines.

Owns what is refused, since it would need a flush, and what a step tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.collectives import Group
from hpctrain.dtypes import dtype_of
from hpctrain.errors import NonFiniteError, UnsupportedError
from hpctrain.plan.memory import MemoryRow
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.updates import updates
from hpctrain.plan.pipeline.versions import versions
from hpctrain.runtime.decision import Decider
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.memory import num_bytes
from hpctrain.runtime.options import TrainerOptions
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.pipelined import Pipelined, StageModels
from hpctrain.runtime.search import in_memory
from hpctrain.runtime.stale_passes import StalePasses, Update
from hpctrain.runtime.step import StepResult
from hpctrain.runtime.weight_versions import WeightVersions

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["StalePipelined", "StaleTrainer"]


class StalePipelined(Pipelined):
    """The place of one rank, as `Pipelined`; refuses what would need a flush at an update."""

    def __init__(self, world: Group, stages: StageModels, options: Pipeline) -> None:
        super().__init__(world, stages, options)
        if self.spread:
            raise UnsupportedError(f"parameter {self.spread[0]!r} is in stages on several ranks, which the schedule "
                                   f"{self.schedule!r} does not support: the copies would see different updates; "
                                   "legal are parameters of one rank each")

    def accept(self, plan: PipelinePlan) -> None:
        """Several updates and versions are legal of one copy of the model; its stages must make the same updates."""
        if plan.copies > 1:
            raise UnsupportedError(f"the plan {plan.name!r} has {plan.copies} copies of the model, and several updates "
                                   "or versions of the weights; legal is one copy")
        updates(plan, versions(plan))

    def check(self, options: TrainerOptions) -> None:
        """Clipping, skipping and scaling are decisions of all stages together, as are ZeRO stages 2 and 3."""
        super().check(options)
        for name, value, legal, fine in (
                ("clip_norm", options.clip_norm, "None", options.clip_norm is None),
                ("loss_scale", options.loss_scale, "None", options.loss_scale is None),
                ("non_finite", options.non_finite, "'stop' or 'ignore'", options.non_finite != "skip")):
            if not fine:
                raise UnsupportedError(f"{name} = {value!r} with the schedule {self.schedule!r} is not supported: all "
                                       f"stages would wait for each other before every update; legal is {legal}")

    def passes(self, flat: FlatModel, decider: Decider, part: Callable[[str], None]) -> StalePasses:
        """Those of the schedule."""
        if "float16" in self.joined({region.layout.dtype: True for region in flat.trained}):
            raise UnsupportedError(f"float16 with the schedule {self.schedule!r} is not supported: it needs a loss "
                                   "scale; legal are 'bfloat16', 'float32' or 'float64'")
        return StalePasses(self, flat, part)


class StaleTrainer(PipelineTrainer):
    """Trains a model over a pipeline that updates while micro-batches are under way. Collective over the world to make.

    As `PipelineTrainer`, but `step` makes several updates: one from each micro-batch, say, which all pipelines of the
    data axis do together; so all ranks have the same number of micro-batches. `loss` of its result is over all of them,
    before the updates that each met; `update` counts all updates, and each has its learning rate; `gradient_norm` and
    `gradients` are of the last. An update whose micro-batches weigh nothing is left out.

    `non_finite` is "stop" here, or "ignore". After NonFiniteError, which all ranks raise at the end of a step, what is
    not finite has been applied, maybe to some stages only: `resume`.
    """

    _pipelined_by = StalePipelined

    def __init__(self, context: Context, stages: StageModels, pipeline: Pipeline, *, trace: bool = False,
                 **options: Any) -> None:
        super().__init__(context, stages, pipeline, trace=trace, **{"non_finite": "stop", **options})
        assert isinstance(self._passes, StalePasses)
        self._stale_passes = self._passes
        self._versions = WeightVersions(self._flat, self.optimizer)
        self._failure: tuple[int, str] | None = None  # the update in the step and what is not finite, on this rank
        self._partial = 0.0
        self._spoiled = False

    @property
    def num_versions(self) -> int:
        """Copies of this rank's weights that there is memory for: the most that a step needed."""
        return self._versions.num_homes

    def _step(self, batches: Sequence[Any]) -> StepResult:
        self._check_sound()
        self.model.check()
        self._times.part("data")
        self._failure, self._partial, before = None, 0.0, self.num_updates
        program, loss_sum, weight, weights = self._stale_passes.program(batches), 0.0, 0.0, list[float]()
        if program is not None:
            self._spoiled = True  # unless it ends well
            loss_sum, weight, weights = self._stale_passes.train_stale(program, batches, self._versions, self._update)
        self.num_updates = before + sum(map(bool, weights))  # on a rank without a stage, too
        if self._stops:
            self._failure = min(filter(None, [self._failure, *self._stale_passes.problems]), default=None)
        partial = nan if self._failure else self._partial
        decision = self._decider.decide(loss_sum, weight, partial, self._context.stop_requested, 1.0)
        if self._stops and decision.skipped == "not finite":
            raise NonFiniteError(self._complaint(len(weights)))
        self._spoiled = False
        norm = decision.norm * decision.weight / weights[-1] if weights and weights[-1] else nan
        rates = self.optimizer.learning_rates(self.num_updates - any(weights))
        skipped = decision.skipped if decision.skipped == "no data" else ""
        return StepResult(decision.loss, decision.weight, norm, rates[-1], self.num_updates, skipped, decision.stop)

    @property
    def _stops(self) -> bool:
        return self.options.non_finite == "stop"

    def _update(self, due: Update) -> None:
        """One update of this rank's stages. Collective over the data axis."""
        if self._stops or due.last:
            self._partial = self._norm.partial(self._arrays, self._flat.counted_gradients())
        if self._stops and self._failure is None and not isfinite(self._partial):
            self._failure = due.number, in_memory(self._flat)
        if not due.weight:
            self._versions.keep(due.needed)
            return
        self._versions.update(due.needed, lambda optimizer: optimizer.apply(self.num_updates, 1 / due.weight,
                                                                            self._gradients))
        self.num_updates += 1

    def _complaint(self, num_updates: int) -> str:
        """What was not finite first. Collective over the world."""
        told = [(*failure, rank) for rank, failure in enumerate(self._world.exchange(self._failure)) if failure]
        update, text, rank = min(told, default=(num_updates, "only the sum over ranks and micro-batches", 0))
        return (f"rank {rank}, update {update} of {num_updates} in this step is not finite: {text}. It is in "
                "the weights by now: resume from a checkpoint")

    def _check_sound(self) -> None:
        if self._spoiled:
            raise NonFiniteError("a step ended in an error, so that the weights may be anything; legal is resume(...) "
                                 "of a checkpoint")

    def save(self, root: str | Path, *, keep: int = 2, data: dict[str, Any] | None = None) -> Path:
        """As `Trainer.save`. Raises NonFiniteError after a step that ended in an error."""
        self._check_sound()
        return super().save(root, keep=keep, data=data)

    def resume(self, where: str | Path, *, policy: str = "auto") -> dict[str, Any] | None:
        """As `Trainer.resume`; with a checkpoint the trainer goes on after a step that ended in an error."""
        self._versions.forget()
        found = super().resume(where, policy=policy)
        self._spoiled = self._spoiled and found is None
        return found

    def _planned_memory(self) -> tuple[MemoryRow, ...]:
        size = sum(r.layout.count * dtype_of(r.layout.dtype).num_bytes for r in self._flat.trained)
        return *super()._planned_memory(), MemoryRow("weight versions", (self._stale_passes.kept - 1) * size)

    def _held(self) -> Iterator[tuple[str, int]]:
        yield from super()._held()
        yield "weight versions", sum(num_bytes(self._arrays, array) for array in self._versions.extra)
