"""The passes of a pipeline that updates while micro-batches are under way.

    F0 F1 B0* R U F2 B1* R U B2* R U        each pass with the version of the weights that `plan.pipeline.versions` says
              |  `- the weight of the update is known; the caller updates; the gradients of the next one begin
              `---- the gradients of update 1 are reduced over the data axis

Owns the joining of the plan's versions with the memory of them, and of its updates with their weights. What an update
is, the trainer says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from hpctrain.contracts import Array, Replicated
from hpctrain.errors import ConfigError
from hpctrain.pipeline.stage import Stage
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.pipeline.updates import updates
from hpctrain.plan.pipeline.versions import versions
from hpctrain.plan.schedule import Action, Forward
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.pipelined import Pipelined, PipelinePasses
from hpctrain.runtime.update_weights import UpdateWeights
from hpctrain.runtime.weight_versions import WeightVersions

__all__ = ["Program", "StalePasses", "Update"]

#: `count(micro_batch, loss_sum, weight)` of each forward of the last stage.
Count = Callable[[int, float, float], None]


class _VersionedStage:
    """A stage whose passes use the version of the weights that the plan says; a backward that of its forward.

    Fulfils `pipeline.stage.Stage`; the stash has the version with it.
    """

    def __init__(self, model: Stage, use: Callable[[int], None], count: Count | None) -> None:
        self._model, self._use, self._count = model, use, count
        self._coming: Iterator[tuple[int, int]] = iter(())

    @property
    def splits(self) -> bool:
        """Of the model."""
        return self._model.splits

    @splits.setter
    def splits(self, splits: bool) -> None:
        self._model.splits = splits

    @property
    def replicated(self) -> Replicated:
        """Of the model."""
        return self._model.replicated

    def begin(self, coming: Sequence[tuple[int, int]]) -> None:
        """A step begins, with these (micro-batch, version) in the order of the forwards."""
        self._coming = iter(coming)

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """In training with the next version; in evaluation with the parameters as they are."""
        if not training:
            return self._model.forward(micro_batch, inputs, training=False)
        number, version = next(self._coming)
        self._use(version)
        outputs, stash = self._model.forward(micro_batch, inputs)
        if self._count is not None:
            self._count(number, float(outputs[0]), float(outputs[1]))
        return outputs, (version, stash)

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Array], None],
                 scale: float = 1.0) -> Any:
        """With the forward's version."""
        version, own = stash
        self._use(version)
        return self._model.backward(own, output_grads, deliver, scale)

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        """With the forward's version."""
        version, own = stash
        self._use(version)
        input_grads, rest = self._model.backward_input(own, output_grads, scale)
        return input_grads, (version, rest)

    def backward_weight(self, rest: Any, deliver: Callable[[str, Array], None]) -> None:
        """With the forward's version."""
        version, own = rest
        self._use(version)
        self._model.backward_weight(own, deliver)


@dataclass(frozen=True)
class Program:
    """What this rank does in a step of so many micro-batches."""

    order: Sequence[Action]
    coming: dict[int, list[tuple[int, int]]]  # by stage (micro-batch, version), in the order of the forwards
    update_of: dict[int, int]  # by micro-batch, counted from 1
    sizes: list[int]  # micro-batches of each update
    needed: Sequence[frozenset[int]]  # by update of this rank
    kept: int


@dataclass(frozen=True)
class Update:
    """An update that is due. `needed` are older versions that are still used; `weight` is over all pipelines."""

    number: int  # in this step, from 1
    last: bool
    weight: float
    needed: frozenset[int]


class StalePasses(PipelinePasses):
    """The passes of one trainer. All methods are collective over the world.

    `problems` are this rank's losses and weights of the last step that are not finite: (update, text).
    """

    def __init__(self, pipelined: Pipelined, flat: FlatModel, part: Callable[[str], None]) -> None:
        last = len(pipelined.places) - 1
        self._stages = {stage: _VersionedStage(model, self._use, self._count if stage == last else None)
                        for stage, model in pipelined.models.items()}
        super().__init__(pipelined, flat, part, self._stages)
        with_weights = pipelined.world.subgroup(pipelined.ranks)
        assert with_weights is not None, "a rank is in its own pipeline"
        self._weights = UpdateWeights(with_weights, pipelined.data, pipelined.places[-1], pipelined.model.arrays)
        self._programs: dict[int, Program] = {}
        self._versions: WeightVersions | None = None
        self._update_of: dict[int, int] = {}
        self.problems: list[tuple[int, str]] = []

    def train(self, batches: Sequence[Any], loss_scale: float) -> NoReturn:
        """A trainer that updates after all passes takes `PipelinePasses`."""
        raise AssertionError("see train_stale")

    def program(self, batches: Sequence[Any]) -> Program | None:
        """What a step with these micro-batches is; None without any.

        Raises:
            ConfigError: ranks have different numbers of micro-batches. On all ranks alike.
            PlanError: the schedule cannot be run.
        """
        number = self._common_number(batches)
        return self._program(number) if number else None

    def train_stale(self, program: Program, batches: Sequence[Any], memory: WeightVersions,
                    update: Callable[[Update], None]) -> tuple[float, float, list[float]]:
        """All passes and updates of a step; gives (loss_sum, weight), which the last stage counts, and all weights."""
        self._versions, self._update_of, self.problems = memory, program.update_of, []
        memory.begin(program.kept)
        self._weights.begin(program.sizes)
        for stage, coming in program.coming.items():
            self._stages[stage].begin(coming)
        never: list[frozenset[str]] = []
        due = iter(enumerate(program.needed, start=1))

        def reduce() -> None:
            never.append(self._gradients.finish())

        def finish_update() -> None:
            k, needed = next(due)
            update(Update(k, k == len(program.sizes), self._weights.of(k), needed))
            self._gradients.start()

        self._gradients.start()
        terms = self.run.train(program.order, batches, self._gradients, 1.0, reduce, finish_update)
        weights = self._weights.finish()
        memory.end()
        self.unused = frozenset.intersection(*never)
        self._part("backward")
        return *terms, weights

    @property
    def kept(self) -> int:
        """Most versions of the weights that a plan of this rank has needed so far."""
        return max((program.kept for program in self._programs.values()), default=1)

    def _use(self, version: int) -> None:
        assert self._versions is not None
        self._versions.use(version)

    def _count(self, micro_batch: int, loss_sum: float, weight: float) -> None:
        update = self._update_of[micro_batch]
        for what, value in (("loss", loss_sum), ("weight", weight)):
            if not isfinite(value):
                self.problems.append((update, f"micro-batch {micro_batch}: the {what} is {value}"))
        self._weights.count(update, weight)

    def _program(self, num_micro_batches: int) -> Program:
        if num_micro_batches not in self._programs:
            pipelined, rank = self._pipelined, self._pipelined.pipeline.rank
            plan = pipelined.plan(num_micro_batches)
            known = versions(plan)
            found = updates(plan, known)
            coming = {stage: [(action.micro_batch, known.used[stage][action.micro_batch])
                              for action in plan.orders[rank] if isinstance(action, Forward) and action.stage == stage]
                      for stage in self._stages}
            self._programs[num_micro_batches] = Program(
                with_messages(plan)[rank], coming, known.made[0], [len(group) for group in found.groups],
                found.needed[rank], found.kept[rank])
        return self._programs[num_micro_batches]

    def _common_number(self, batches: Sequence[Any]) -> int:
        """How many micro-batches all ranks have. Collective over the world."""
        told = self._pipelined.world.exchange(len(batches))
        for rank, number in enumerate(told):
            if number != told[0]:
                raise ConfigError(f"{told[0]} micro-batches on rank 0, {number} on rank {rank}: with the schedule "
                                  f"{self._pipelined.schedule!r} all pipelines update together, so legal is the same "
                                  "number on all ranks")
        return int(told[0])
