"""One training step, and the trainer that repeats it: joins model, reduction, optimizer and checkpoint.

    F0 B0 F1 B1* R U      the schedule (plan.schedule), run by the pipeline executor
            |    | `----- optimizer.apply(scale = clip / global weight)
            |    `------- reduction.finish, then one small reduction: loss, weight, norm, stop flag
            `------------ each complete gradient bucket starts its reduction

The definition of the loss is (sum of loss terms) / (global weight) over accumulation and the data axis; the step's
gradient is that of this quotient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import log
from hpctrain.contracts import Array, Model
from hpctrain.errors import ConfigError, NonFiniteError
from hpctrain.optim.clip import gradient_norm, update_scale
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.optim.groups import resolve_groups
from hpctrain.optim.options import Optimizer, ParameterGroup
from hpctrain.optim.schedule import Constant, Schedule
from hpctrain.pipeline.executor import execute
from hpctrain.plan.flat import BUCKET_BYTES, make_buckets
from hpctrain.plan.memory import MemoryRow, Partition, StateTypes, by_layout
from hpctrain.plan.schedule import Backward, Forward, OptimizerStep, ReduceGrads, accumulate
from hpctrain.plan.split import part
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.memory import live, report
from hpctrain.runtime.saved_state import SavedState
from hpctrain.runtime.straggler import StepTimes
from hpctrain.zero.reduction import GradientReduction

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["Evaluation", "StepResult", "Trainer"]


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on all ranks.

    `loss` is global (sum of loss terms) / weight; `gradient_norm` is the L2 norm before clipping; `lr` that of the
    last group; `update` counts applied updates, this one included. `skipped` tells why nothing was applied ("" if it
    was): "no data" when no rank had a micro-batch, "not finite" when the gradient was not. `stop`: some rank was
    asked to end (a signal): save and leave.
    """

    loss: float
    weight: float
    gradient_norm: float
    lr: float
    update: int
    skipped: str
    stop: bool


@dataclass(frozen=True)
class Evaluation:
    """Global loss and weight of a forward-only pass; the same on all ranks."""

    loss: float
    weight: float


class Trainer:
    """Trains one model data-parallel over all ranks of the context. Collective over the world to make.

    After `max_skips` steps in a row whose gradient was not finite, `step` raises NonFiniteError on all ranks.
    """

    def __init__(self, context: Context, model: Model, *, optimizer: Optimizer, groups: Sequence[ParameterGroup] = (),
                 schedule: Schedule | None = None, clip_norm: float | None = None, bucket_bytes: int = BUCKET_BYTES,
                 max_skips: int = 10) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"clip_norm = {clip_norm!r} is not legal; legal are numbers above 0, or None (off)")
        self._context = context
        self._group = context.world
        self._arrays = model.arrays
        self._flat = FlatModel(model, self._group)
        trained = [p for p in self._flat.placements if not p.frozen]
        resolved = resolve_groups(trained, optimizer, groups, schedule or Constant())
        self.optimizer = FlatOptimizer(self._arrays, optimizer, resolved, self._flat.trained)
        buckets = [(b.gradients, bucket) for b in self._flat.trained for bucket in make_buckets(b.layout, bucket_bytes)]
        self._reduction = GradientReduction(self._group, buckets)
        self._totals = self._arrays.zeros(5, "float64")
        self._saved = SavedState(context, self._flat, self.optimizer)
        self._during = context.recorder.during
        every = context.watch.straggler if self._group.size > 1 else 0
        self._times = StepTimes(self._group, context.recorder, context.host, every, log.warning)
        self._clip_norm = clip_norm
        self._max_skips, self._skips = max_skips, 0
        self.num_updates = 0
        self._gradient_factor = 1.0
        self.unused: frozenset[str] = frozenset()

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self._flat.model

    def step(self, micro_batches: Iterable[Any]) -> StepResult:
        """One update from this rank's micro-batches (none is legal). Collective over the data axis."""
        with self._during("step"):
            result = self._step(list(micro_batches))
            self._times.step_ends()
        return result

    def _step(self, batches: Sequence[Any]) -> StepResult:
        stashes: dict[int, Any] = {}
        terms = [0.0, 0.0]
        result: list[StepResult] = []

        def forward(action: Forward) -> None:
            (loss_sum, weight), stashes[action.micro_batch] = self.model.forward(batches[action.micro_batch])
            terms[0] += loss_sum
            terms[1] += weight
            self._times.part("forward")

        def backward(action: Backward) -> None:
            ready = self._reduction.ready if action.completes else _ignore
            self.model.backward(stashes.pop(action.micro_batch), None, ready)
            self._times.part("backward")

        def reduce_gradients(action: ReduceGrads) -> None:
            self.unused = self._reduction.finish()

        def update(action: OptimizerStep) -> None:
            result.append(self._update(*terms))

        self._times.part("data")
        self._flat.zero_gradients()
        execute(accumulate(len(batches)), {Forward: forward, Backward: backward, ReduceGrads: reduce_gradients,
                                           OptimizerStep: update})
        return result[0]

    def _update(self, loss_sum: float, weight: float) -> StepResult:
        """The joint decision, and the update if it is one. Collective over the data axis."""
        loss_sum, weight, squares, stop = self._reduce_totals(
            loss_sum, weight, self._own_sum_of_squares(), float(self._context.stop_requested))
        rates = self.optimizer.learning_rates(self.num_updates)
        norm = gradient_norm(squares, weight) if weight and squares >= 0 else nan
        skipped = "no data" if weight == 0 else "" if isfinite(norm) and isfinite(loss_sum) else "not finite"
        scale = 1.0
        if not skipped:
            scale = update_scale(norm, weight, self._clip_norm)
            self.optimizer.apply(self.num_updates, scale)
            self.num_updates += 1
        self._gradient_factor = 1 / (scale * weight) if weight else 1.0
        self._count_skips(skipped)
        loss = loss_sum / weight if weight else nan
        return StepResult(loss, weight, norm, rates[-1], self.num_updates, skipped, stop > 0)

    def _own_sum_of_squares(self) -> float:
        """This rank's part of the norm: each logical element is counted by one rank."""
        total = 0.0
        for b in self._flat.trained:
            start, stop = part(b.layout.count, self._group.size, self._group.rank)
            total += self._arrays.sum_of_squares(b.gradients[start:stop])
        return total

    def _reduce_totals(self, *values: float) -> list[float]:
        """Sums a few numbers over the data axis, the same bits on every rank."""
        for i, value in enumerate(values):
            self._arrays.fill(self._totals[i : i + 1], value)
        self._group.all_reduce(self._totals)
        return [float(x) for x in self._totals[: len(values)]]

    def _count_skips(self, skipped: str) -> None:
        if skipped != "not finite":
            self._skips = 0
            return
        self._skips += 1
        if self._context.rank == 0:
            warnings.warn(f"update {self.num_updates}: the gradient is not finite, step skipped on all ranks "
                          f"({self._skips} in a row)", stacklevel=4)
        if self._skips >= self._max_skips:
            raise NonFiniteError(f"{self._skips} steps in a row had a gradient that is not finite; lower the learning "
                                 "rate, or look for bad samples in the last batches")

    def evaluate(self, micro_batches: Iterable[Any]) -> Evaluation:
        """Loss over all ranks' micro-batches, forward only; ranks may have different numbers. Collective."""
        terms = [0.0, 0.0]
        with self._during("step"):
            for batch in micro_batches:
                (loss_sum, weight), _ = self.model.forward(batch, training=False)
                terms[0] += loss_sum
                terms[1] += weight
            loss_sum, weight = self._reduce_totals(*terms)
        return Evaluation(loss_sum / weight if weight else nan, weight)

    def observe(self, value: float) -> None:
        """Feeds a measurement (a validation loss) to schedules that wait for one; rank 0's counts. Collective."""
        self.optimizer.observe(self._group.broadcast_value(float(value)))

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """(name, flat gradient of the last step's loss, before clipping), as copies. Local."""
        for name, gradient in self._flat.gradients():
            copy = self._arrays.to_flat(gradient)
            self._arrays.scale(copy, self._gradient_factor)
            yield name, copy

    def memory_report(self) -> str:
        """Memory that was planned and that is there, all ranks, as a table; the same on every rank. Collective."""
        return report(self._group, self._planned_memory(), live(self._arrays, self._held()))

    def _planned_memory(self) -> tuple[MemoryRow, ...]:
        types = StateTypes(num_moments=len(self.optimizer.state))
        return by_layout(self._flat.placements, self._group.rank, types, Partition(self._group.size))

    def _held(self) -> Iterator[tuple[str, Array]]:
        """(row of the memory plan, flat buffer) of all that this rank holds."""
        for b in self._flat.trained:
            yield from (("parameters", b.parameters), ("gradients", b.gradients))
        yield from (("parameters", buffer) for _, buffer in self._flat.frozen)
        yield from (("moments", state) for slot in self.optimizer.state.values() for state in slot)

    def save(self, root: str | Path, *, keep: int = 2, data: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint of everything, with `data` (JSON values: where the data stands). Collective."""
        with self._during("checkpoint"):
            return self._saved.save(Path(root), self.num_updates, keep, data or {})

    def resume(self, where: str | Path, *, policy: str = "auto") -> dict[str, Any] | None:
        """Loads a checkpoint of any number of ranks and returns the `data` saved with it. Collective.

        `where` is a root or one checkpoint. Policy "auto": the newest valid one, None if there is none. "require":
        CheckpointError if there is none.
        """
        if policy not in ("auto", "require"):
            raise ConfigError(f"policy = {policy!r} is not legal; legal are 'auto' or 'require'")
        with self._during("checkpoint"):
            found = self._saved.load(Path(where), must_exist=policy == "require")
        if found is None:
            return None
        self.num_updates, data = found
        return data


def _ignore(name: str) -> None:
    """A micro-batch that does not complete the gradient."""
