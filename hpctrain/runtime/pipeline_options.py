"""What a pipeline is to look like: its schedule and how many ranks it has. Pure data, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.updates import is_stale
from hpctrain.zero.options import Zero

__all__ = ["RUNNABLE", "STALE", "Pipeline", "check_zero"]

#: The schedules that update while micro-batches are under way, with several versions of the weights.
STALE = tuple(name for name in SCHEDULES if name.startswith("pipedream"))

#: Those that update all ranks together, from one version of the weights.
RUNNABLE = tuple(name for name in SCHEDULES if name not in STALE)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline along one axis of the ranks: `hpctrain.Pipeline("1f1b", ranks=4)`. See docs/pipelines.md.

    Attributes:
        schedule: a name of RUNNABLE or STALE; or a plan; or a function of (ranks, micro-batches) that makes one.
        ranks: ranks of one pipeline; None: all ranks, or those of the plan. The job has a multiple of them, and the
            data is shared out over the pipelines.
        chunks: stages a rank, where the schedule takes that.
        options: others that the schedule takes, by name.
    """

    schedule: str | PipelinePlan | Callable[[int, int], PipelinePlan] = "1f1b"
    ranks: int | None = None
    chunks: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks is not None and (isinstance(self.ranks, bool) or not isinstance(self.ranks, int)
                                       or self.ranks < 1):
            raise ConfigError(f"pipeline.ranks = {self.ranks!r} must be an integer of at least 1, or None")

    def num_ranks(self, size: int) -> int:
        """Ranks of one pipeline in a job of `size` ranks.

        Raises:
            ConfigError: they do not divide `size`.
        """
        planned = self.schedule.num_ranks if isinstance(self.schedule, PipelinePlan) else None
        ranks = self.ranks if self.ranks is not None else planned if planned is not None else size
        if planned is not None and ranks != planned:
            raise ConfigError(f"pipeline.ranks = {ranks}, but the plan {_name(self.schedule)} is for {planned}")
        if size % ranks:
            raise ConfigError(f"pipeline.ranks = {ranks} does not divide the {size} ranks of the job")
        return ranks

    def plan(self, num_ranks: int, num_micro_batches: int) -> PipelinePlan:
        """The plan of a step, not proved yet.

        Raises:
            ConfigError: the schedule is not for so many ranks or micro-batches, or does not take an option.
        """
        options = {"chunks": self.chunks, **self.options}
        if isinstance(self.schedule, str):
            return schedule(self.schedule, num_ranks, num_micro_batches, **options)
        if given := [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"pipeline.{given[0]} is for schedules by name; this one is {_name(self.schedule)}")
        made = self.schedule if isinstance(self.schedule, PipelinePlan) else self.schedule(num_ranks, num_micro_batches)
        if made.num_ranks != num_ranks or made.num_micro_batches != num_micro_batches:
            raise ConfigError(f"the plan {made.name!r} is for {made.num_ranks} ranks and {made.num_micro_batches} "
                              f"micro-batches, not for {num_ranks} and {num_micro_batches}")
        return made

    def first_plan(self, num_ranks: int) -> PipelinePlan:
        """A plan that shows where the stages are, which is the same whatever the number of micro-batches."""
        fixed = self.schedule.num_micro_batches if isinstance(self.schedule, PipelinePlan) else 1
        return self.plan(num_ranks, fixed)

    def is_stale(self, size: int) -> bool:
        """Whether a step updates several times, in a job of `size` ranks; of a function its plan for 1 micro-batch."""
        return is_stale(self.first_plan(self.num_ranks(size)))


def check_zero(zero: Zero) -> None:
    """Raises UnsupportedError for what does not go with a pipeline."""
    if zero.stage > 1:
        raise UnsupportedError(f"zero.stage = {zero.stage} with a pipeline is not supported: each micro-batch of each "
                               "stage would gather or reduce by itself, and the schedule would wait for it; legal "
                               "are 0 or 1")
    if zero.offload.on_disk or zero.offload.delay:
        raise UnsupportedError("zero.offload with a pipeline is not supported; legal is none")


def _name(given: object) -> str:
    return repr(getattr(given, "name", getattr(given, "__name__", type(given).__name__)))
