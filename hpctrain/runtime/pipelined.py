"""A model cut into stages over a pipeline axis, with a data axis beside it: joins schedule, messages and gradients.

    6 ranks, pipeline 3         pipeline 0   1   2
                       data 0   rank     0   2   4      a column holds the same stages: one data group
                       data 1   rank     1   3   5      a row runs one schedule on its own micro-batches

    two copies of the model    0   1   2   copy 0       ranks at both ends hold the same stages, 0 and 2: their columns
    (DualPipe)                 2   1   0   copy 1       together are one data group

Owns who holds which stage, the agreement on names and numbers between the ranks of a row, and the passes. The update
belongs to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.contracts import Model
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.pipeline.run import PipelineRun
from hpctrain.pipeline.stage import Stage
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.pipeline.alone import alone
from hpctrain.plan.pipeline.forwards import forwards
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.proof import prove
from hpctrain.plan.pipeline.updates import is_stale
from hpctrain.plan.schedule import Action
from hpctrain.runtime.decision import Decider
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.options import TrainerOptions
from hpctrain.runtime.pipeline_options import Pipeline, check_zero
from hpctrain.runtime.search import Look, buffers_kept
from hpctrain.runtime.stages import Stages
from hpctrain.runtime.tied import TiedGradients, share_values, tied_groups

__all__ = ["PipelinePasses", "Pipelined", "StageModels"]

#: Micro-batches for each rank of a pipeline that an evaluation takes up at a time.
EVALUATED = 8

StageModels = Sequence[Model] | Callable[[int], Model]


class Pipelined:
    """The place of one rank. Collective over `world` to make; fulfils `parallel.Parallel`.

    Args:
        world: all ranks.
        stages: the models of all stages, or a function that makes one by its number; only this rank's are used.
        options: the pipeline.

    Raises:
        ConfigError: sizes that do not go together; a parameter that two stages have in different ways. On all ranks
            alike.
        PlanError: the schedule cannot be run.
    """

    def __init__(self, world: Group, stages: StageModels, options: Pipeline) -> None:
        self.world, self.options = world, options
        ranks = options.num_ranks(world.size)
        first = options.first_plan(ranks)
        prove(first)
        self.accept(first)
        self.places, self.depth, self.schedule = first.places, first.depth, first.name
        if not callable(stages) and len(stages) != self.depth:
            raise ConfigError(f"stages has {len(stages)} models; {first.name!r} on {ranks} ranks has "
                              f"{self.depth} stages")
        mesh = Mesh({"pipeline": ranks, "data": world.size // ranks})
        self.mesh: Mapping[str, int] = dict(mesh.lengths)
        self.data_rank = mesh.coordinates(world.rank)["data"]
        self.ranks = mesh.group(world.rank, "pipeline")
        self.pipeline = _subgroup(world, self.ranks)
        place = self.pipeline.rank
        peers = first.peers()
        self.data = _subgroup(world, _columns(mesh, peers[place]))
        with world.agree():
            make = stages if callable(stages) else stages.__getitem__
            self.model = Stages({part: make(part) for part in first.parts_of(place)})
            self.model.buffers()
        self.models = {stage: self.model.models[stage % self.depth] for stage in first.stages_of(place)}
        self._learn(mesh, peers)

    def _learn(self, mesh: Mesh, peers: Sequence[Sequence[int]]) -> None:
        """What all stages have, and what several have, or ranks that are no peers."""
        mine = {str(part): [[p.name, list(p.shape), p.dtype, p.frozen] for p in m.placements]
                for part, m in self.model.models.items()}
        tables = self.pipeline.exchange(mine)
        found: dict[str, tuple[int, list[Any]]] = {}
        holders: dict[str, set[tuple[int, int]]] = {}  # (stage of the model, place)
        for stage, place in enumerate(self.places):
            part = stage % self.depth
            for name, *facts in tables[place][str(part)]:
                other, known = found.setdefault(name, (stage, facts))
                if known != facts:
                    raise ConfigError(f"parameter {name!r} is {facts} in stage {stage}, {known} in stage {other}: "
                                      "(shape, dtype, frozen) must be equal where stages share a parameter")
                holders.setdefault(name, set()).add((part, place))
        self.trained = [any(not frozen for *_, frozen in tables[place][str(part)])
                        for part, place in enumerate(self.places[: self.depth])]
        self.spread = sorted(name for name, pairs in holders.items() if len({place for _, place in pairs}) > 1)
        tied: dict[str, tuple[int, ...]] = {}
        for name, pairs in holders.items():
            places = {place for _, place in pairs}
            if len({part for part, _ in pairs}) > 1 or not places <= set(peers[min(places)]):
                tied[name] = _columns(mesh, places)
        here = peers[self.pipeline.rank]
        self.elsewhere = frozenset(name for name in tied if self.places[found[name][0]] not in here)
        self.tied = tied_groups(self.world, tied)
        share_values(self.model, self.tied)

    def accept(self, plan: PipelinePlan) -> None:
        """Raises UnsupportedError for several updates, or versions of the weights, in a step. Local."""
        if is_stale(plan):
            raise UnsupportedError(f"the plan {plan.name!r} for {plan.num_micro_batches} micro-batches has several "
                                   "updates or versions of the weights, and that for 1 has not; legal is weights other "
                                   "than 'one' for all numbers, or one update for all")

    def check(self, options: TrainerOptions) -> None:
        """ZeRO stages 2 and 3 and offload are refused."""
        check_zero(options.zero)

    def passes(self, flat: FlatModel, decider: Decider, part: Callable[[str], None]) -> PipelinePasses:
        """Those of the schedule."""
        return PipelinePasses(self, flat, part)

    def joined(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """By place along the pipeline; a later place wins where two have one name. Collective over the pipeline."""
        return {name: value for part in self.pipeline.exchange(dict(mine)) for name, value in part.items()}

    def plan(self, num_micro_batches: int) -> PipelinePlan:
        """The proved plan of a step. Local.

        Raises:
            ConfigError: the schedule is not for so many micro-batches, or puts stages on other ranks for them.
            PlanError: it cannot be run.
        """
        plan = self.options.plan(self.pipeline.size, num_micro_batches)
        if (plan.places, plan.depth) != (self.places, self.depth):
            raise ConfigError(f"{plan.name!r} puts {plan.depth} stages on ranks {plan.places} for {num_micro_batches} "
                              f"micro-batches, but the models are {self.depth} stages on {self.places}")
        prove(plan)
        self.accept(plan)
        return plan


class PipelinePasses:
    """The passes of one trainer. All methods are collective over the world; `part(name)` hears what was done.

    All ranks of a pipeline give the same micro-batches (a stage ignores of them what it does not need); those of other
    pipelines may have other numbers of them, or none.
    """

    def __init__(self, pipelined: Pipelined, flat: FlatModel, part: Callable[[str], None],
                 stages: Mapping[int, Stage] | None = None) -> None:
        self._pipelined, self._flat, self._part = pipelined, flat, part
        # Ranks that hold the same stages in other copies complete them in another order, or twice.
        self._gradients = TiedGradients(flat, pipelined.tied, early=pipelined.depth == len(pipelined.places))
        self.run = PipelineRun(pipelined.places, pipelined.models if stages is None else stages, pipelined.pipeline,
                               pipelined.model.arrays, arrays_of, pipelined.trained)
        self._orders: dict[int, Sequence[Action]] = {}
        self.unused: frozenset[str] = frozenset()

    def train(self, batches: Sequence[Any], loss_scale: float) -> tuple[float, float]:
        """Forward and backward by the schedule; gradients are reduced. The last stage counts loss and weight."""
        order = self._order(self._number(batches))
        self._gradients.start()
        if not order:
            self._reduce()
            return 0.0, 0.0
        terms = self.run.train(order, batches, self._gradients, loss_scale, self._reduce)
        self._part("backward")
        return terms

    def _reduce(self) -> None:
        self.unused = self._gradients.finish()

    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """Forward only: (loss_sum, weight), which the last stage counts. Through the first copy of the model.

        Some micro-batches at a time, since there may be more than there is memory for.
        """
        group, places = self._pipelined.pipeline, self._pipelined.places[: self._pipelined.depth]
        left, loss_sum, weight = iter(batches), 0.0, 0.0
        while self._number(some := list(islice(left, EVALUATED * group.size))):
            terms = self.run.evaluate(forwards(places, group.size, len(some))[group.rank], some)
            loss_sum, weight = loss_sum + terms[0], weight + terms[1]
        return loss_sum, weight

    def search(self, batches: Sequence[Any], loss_scale: float) -> str:
        """Runs the micro-batches again, one by one, to the first with a value that is not finite.

        Told by the rank that came upon it first: the last stage if it is the loss, else the one whose backward came
        first; "" on all others. Buffers and `run.peaks` and `spans` are what they were before the search.
        """
        kept = self.run.peaks, self.run.spans
        with buffers_kept(self._flat.model):
            told = next(filter(None, (self._look(batches, i, loss_scale) for i in range(len(batches)))), None)
        self.run.peaks, self.run.spans = kept
        return told[1] if told is not None and told[0] == self._pipelined.pipeline.rank else ""

    def _look(self, batches: Sequence[Any], micro_batch: int, loss_scale: float) -> tuple[int, str] | None:
        """(rank, what it tells) of the first value that is not finite, or None. Collective over the pipeline."""
        pipelined, look = self._pipelined, Look(self._flat.model.arrays)
        group = pipelined.pipeline
        order = alone(pipelined.plan(len(batches)), micro_batch)[group.rank]
        loss_sum, _ = self.run.train(order, batches, look, loss_scale, _nothing)
        stages = [s for s, model in pipelined.model.models.items() if look.found in {p.name for p in model.placements}]
        reached = len(pipelined.places) if not isfinite(loss_sum) else max(stages, default=-1)
        told = [(stage, rank, text) for rank, (stage, text) in
                enumerate(group.exchange([reached, look.told(micro_batch, loss_sum)])) if text]
        return max(told)[1:] if told else None

    def _order(self, num_micro_batches: int) -> Sequence[Action]:
        """This rank's actions, with messages; none without micro-batches."""
        if num_micro_batches and num_micro_batches not in self._orders:
            plan = self._pipelined.plan(num_micro_batches)
            self._orders[num_micro_batches] = with_messages(plan)[self._pipelined.pipeline.rank]
        return self._orders.get(num_micro_batches, ())

    def _number(self, batches: Sequence[Any]) -> int:
        """How many micro-batches all ranks of the pipeline have. Collective over the pipeline."""
        told = self._pipelined.pipeline.exchange(len(batches))
        for place, number in enumerate(told):
            if number != told[0]:
                raise ConfigError(f"{told[0]} micro-batches on rank 0 of the pipeline, {number} on rank {place}: all "
                                  "ranks of a pipeline are given the same ones")
        return told[0]


def _nothing() -> None:
    """No gradients are reduced."""


def _columns(mesh: Mesh, places: Iterable[int]) -> tuple[int, ...]:
    """The ranks at these places along the pipeline, of all pipelines."""
    return tuple(sorted(mesh.rank({"pipeline": place, "data": d}) for place in places
                        for d in range(mesh.length("data"))))


def _subgroup(world: Group, ranks: Sequence[int]) -> Group:
    made = world.subgroup(ranks)
    assert made is not None, "a rank is in its own groups"
    return made
