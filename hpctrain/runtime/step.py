"""One training step, and the trainer that repeats it: joins model, gradients, optimizer and checkpoint.

    F0 B0 F1 B1* R U      the schedule (plan.schedule), run by `passes`
            |    | `----- one small reduction: loss, weight, norm, stop flag (`decision`);
            |    |        optimizer.apply(scale = clip / (global weight * loss scale)); all see what owners updated
            |    `------- gradients.finish
            `------------ each complete gradient bucket starts its reduction

The definition of the loss is (sum of loss terms) / (global weight) over accumulation and the data axis; the step's
gradient is that of this quotient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import log
from hpctrain.contracts import Array, Model
from hpctrain.errors import ConfigError, NonFiniteError
from hpctrain.optim.clip import norm_of, update_scale
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.optim.groups import resolve_groups
from hpctrain.optim.loss_scale import default_loss_scale
from hpctrain.plan.memory import MemoryRow, Partition, by_regions
from hpctrain.runtime.decision import Decider, Decision
from hpctrain.runtime.delayed import Delayed
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.heap import give_back
from hpctrain.runtime.memory import num_bytes, report
from hpctrain.runtime.options import TrainerOptions
from hpctrain.runtime.parallel import DataParallel, Parallel
from hpctrain.runtime.saved_state import SavedState
from hpctrain.runtime.straggler import StepTimes

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["Evaluation", "StepResult", "Trainer"]


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on all ranks.

    `loss` is global (sum of loss terms) / weight; `gradient_norm` is the norm before clipping; `lr` that of the last
    group; `update` counts updates, this one included, whether it is applied or comes late (`zero.offload.delay`).
    `skipped` tells why nothing was applied ("" if it was):
    "no data" when no rank had a micro-batch, "not finite" when the loss or the gradient was not. `stop`: some rank was
    asked to end (a signal): save and leave. `loss_scale` is what the loss was multiplied by in this step.
    """

    loss: float
    weight: float
    gradient_norm: float
    lr: float
    update: int
    skipped: str
    stop: bool
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Evaluation:
    """Global loss and weight of a forward-only pass; the same on all ranks."""

    loss: float
    weight: float


class Trainer:
    """Trains one model data-parallel over all ranks of the context. Collective over the world to make.

    `options` are those of `TrainerOptions`; `optimizer` is the only one without a default. `parallel` says how ranks
    share the work; None: each has the whole model.
    """

    def __init__(self, context: Context, model: Model, *, parallel: Parallel | None = None, **options: Any) -> None:
        self.options = TrainerOptions(**options)
        o = self.options
        self._parallel = parallel = parallel or DataParallel(context.world)
        parallel.check(o)
        self._context, self._world, self._group = context, parallel.world, parallel.data
        self._arrays = model.arrays
        self._flat = FlatModel(model, self._group, o.zero, o.precision,
                               whole_tensors=o.optimizer.ownership == "tensor")
        trained = [p for p in self._flat.placements if not p.frozen]
        groups = resolve_groups(trained, o.optimizer, o.groups, o.schedule)
        with self._world.agree():
            self.optimizer = FlatOptimizer(self._arrays, o.optimizer, groups, self._flat.own_buffers(), self._flat.home)
            self._delayed = Delayed(self._flat, self.optimizer)
        self._gradients = self._flat.own_gradients()
        self._norm = norm_of(o.norm_kind)
        self._decider = Decider(self._world, self._arrays, self._norm)
        types = parallel.joined({r.layout.dtype: True for r in self._flat.trained})
        self._scaling = o.loss_scale or default_loss_scale("float16" in types)
        self.loss_scale = self._scaling.start()
        self._saved = SavedState(context, parallel, self._flat, self.optimizer, self._delayed)
        self._during = context.recorder.during
        every = context.watch.straggler if self._world.size > 1 else 0
        self._times = StepTimes(self._world, context.recorder, context.host, every, log.warning)
        self._passes = parallel.passes(self._flat, self._decider, self._times.part)
        self._skips = 0
        self.num_updates = 0
        self._gradient_factor = 1.0
        give_back()

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self._flat.model

    @property
    def rank(self) -> int:
        """This rank on the data axis."""
        return self._group.rank

    @property
    def unused(self) -> frozenset[str]:
        """Parameters that no backward of the last step reached on this rank."""
        return self._passes.unused

    def step(self, micro_batches: Iterable[Any]) -> StepResult:
        """One update from this rank's micro-batches (none is legal). Collective over the world."""
        with self._during("step"):
            result = self._step(list(micro_batches))
            self._times.step_ends()
        return result

    def _step(self, batches: Sequence[Any]) -> StepResult:
        self.model.check()  # also where there is no data: all ranks raise alike
        self._times.part("data")
        scale, random = self.loss_scale.scale, self.model.rank_state()
        self._delayed.start()
        loss_sum, weight = self._passes.train(batches, scale)
        partial = self._norm.partial(self._arrays, self._flat.counted_gradients(self._parallel.elsewhere))
        decision = self._decider.decide(loss_sum, weight, partial, self._context.stop_requested, scale)
        rates = self.optimizer.learning_rates(self.num_updates)
        factor = self._apply(decision, scale)
        self._gradient_factor = 1 / (factor * decision.weight * scale) if decision.weight else 1.0
        self._judge(decision, batches, random)
        return StepResult(decision.loss, decision.weight, decision.norm, rates[-1], self.num_updates,
                          self._verdict(decision), decision.stop, scale)

    def _verdict(self, decision: Decision) -> str:
        """Why the step is skipped, under this trainer's policy."""
        ignored = decision.skipped == "not finite" and self.options.non_finite == "ignore"
        return "" if ignored else decision.skipped

    def _apply(self, decision: Decision, scale: float) -> float:
        """The update, if it is one; returns the factor by which the gradients in memory were multiplied."""
        self._delayed.publish()
        if self._verdict(decision):
            return 1.0
        norm = decision.norm if isfinite(decision.norm) else 0.0  # no clipping by what is no number
        factor = update_scale(norm, decision.weight * scale, self.options.clip_norm)
        update = self.num_updates
        self.num_updates += 1
        if self._delayed.begins(update):
            self._delayed.keep(update, factor, self._gradients)
            return 1.0
        self.optimizer.apply(update, factor, self._gradients)
        self._flat.publish()
        return factor

    def _judge(self, decision: Decision, batches: Sequence[Any], random: dict[str, bytes]) -> None:
        """Moves the loss scale, counts skips, and says or raises what has to be said. Collective over the world."""
        if decision.skipped == "no data":
            return
        bad = decision.skipped == "not finite"
        before, self.loss_scale = self.loss_scale, self._scaling.after(self.loss_scale, bad)
        if not bad:
            self._skips = 0
            return
        adapts = isfinite(decision.loss_sum) and self.loss_scale != before
        if self.options.non_finite == "ignore" or (adapts and self.options.non_finite == "skip"):
            return
        self._skips += 1
        where = self._search(batches, random)
        text = f"update {self.num_updates}: the loss or the gradient is not finite ({where})"
        if self.options.non_finite == "stop":
            raise NonFiniteError(text)
        if self._context.rank == 0:
            warnings.warn(f"{text}, step skipped on all ranks ({self._skips} in a row)", stacklevel=4)
        if self._skips >= self.options.max_skips:
            raise NonFiniteError(f"{self._skips} steps in a row were not finite, the last: {text}; lower the learning "
                                 "rate, or look for bad samples in the last batches")

    def _search(self, batches: Sequence[Any], random: dict[str, bytes]) -> str:
        """The first rank, micro-batch and parameter with a value that is not finite. Collective over the world."""
        now = self.model.rank_state()
        self.model.restore_rank_state(random)
        found = self._passes.search(batches, self.loss_scale.scale)
        self.model.restore_rank_state(now)
        told = [f"rank {rank}, {text}" for rank, text in enumerate(self._world.exchange(found)) if text]
        return told[0] if told else "only in the sum over ranks and micro-batches"

    def evaluate(self, micro_batches: Iterable[Any]) -> Evaluation:
        """Loss over all ranks' micro-batches, forward only; ranks may have different numbers. Collective."""
        with self._during("step"):
            loss_sum, weight = self._decider.add(*self._passes.evaluate(micro_batches))
        return Evaluation(loss_sum / weight if weight else nan, weight)

    def observe(self, value: float) -> None:
        """Feeds a measurement (a validation loss) to schedules that wait for one; rank 0's counts. Collective."""
        self.optimizer.observe(self._world.broadcast_value(float(value)))

    def gradients(self) -> Iterator[tuple[str, Array]]:
        """(name, flat gradient of the last step's loss, before clipping), as copies. Collective over the data axis."""
        for name, gradient in self._flat.gradient_copies():
            self._arrays.scale(gradient, self._gradient_factor)
            yield name, gradient

    def parameters(self) -> Iterator[tuple[str, Array]]:
        """(name, flat values) of all parameters, as copies. Collective over the data axis."""
        return self._flat.parameters.values()

    @contextmanager
    def gathered(self, names: Iterable[str] | None = None, *, modify: int | None = None) -> Iterator[Model]:
        """Within it every rank can read and run the whole model, also where parameters are spread over the ranks.

        Collective over the data axis; what happens within is local.

        Args:
            names: the parameters that are wanted; None: all. Others may be there as well.
            modify: a rank whose changes of the parameters are kept, by all ranks; only that one may change any. None:
                nobody may.

        Raises:
            ConfigError: no parameter has such a name, or no rank that number. On all ranks alike.
        """
        with self._flat.gathered(None if names is None else tuple(names), modify) as model:
            yield model

    def memory_report(self) -> str:
        """Memory that was planned and that is there, all ranks, as a table; the same on every rank. Collective."""
        return report(self._world, self._planned_memory(), self._held())

    def _planned_memory(self) -> tuple[MemoryRow, ...]:
        zero, n = self.options.zero, self._group.size
        share = "node" if self._flat.parameters.shared else "none"
        offload = zero.offload
        partition = Partition(n, zero.stage, share, n, zero.accumulate, states=offload.states or "device",
                              gradients=offload.gradients or "device", parameters=offload.parameters or "device",
                              delay=offload.delay)
        return by_regions(self._flat.regions, self._group.rank, partition, num_moments=len(self.optimizer.state))

    def _held(self) -> Iterator[tuple[str, int]]:
        """(row of the memory plan, bytes) of all that this rank holds; of a node's memory its share."""
        flat, n = self._flat, self._group.size
        shares = n if flat.parameters.shared else 1
        for held, master in zip(flat.parameters.held, flat.parameters.masters, strict=True):
            yield "parameters", num_bytes(self._arrays, held.array) // shares
            if master is not held:
                yield "master", num_bytes(self._arrays, master.array)
        units = [] if flat.units is None else flat.units.windows
        arrays = [*(("gradients", held.array) for held in flat.gradients.held),
                  *(("late gradients", held.array) for held in self._delayed.held),
                  *(("gradient windows", window) for window in flat.gradients.windows),
                  *(("gather windows", window) for window in units),
                  *(("moments", state) for slot in self.optimizer.state.values() for state in slot)]
        yield from ((name, num_bytes(self._arrays, array)) for name, array in arrays)

    def save(self, root: str | Path, *, keep: int = 2, data: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint of everything, with `data` (JSON values: where the data stands). Collective."""
        with self._during("checkpoint"):
            return self._saved.save(Path(root), self.num_updates, keep, data or {},
                                    self._scaling.save(self.loss_scale))

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
        self.num_updates, data, scaling = found
        self.loss_scale = self._scaling.restore(scaling)
        return data
