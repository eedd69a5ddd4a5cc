"""How long a rank may wait for others, and what happens then.

Owns the options of the watch over a job and their defaults. Pure data: no thread, no MPI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["PHASES", "Watch"]

PHASES = ("init", "data", "step", "checkpoint")


@dataclass(frozen=True)
class Watch:
    """Options of the watch over a job: `hpctrain.start(watch=hpctrain.Watch(limit=600))`.

    A rank that has waited longer than `limit` seconds in one collective ends the job, with a report, unless another
    rank is legally at work: in the function of an `on_root`, or within its own phase's limit. `phases` has limits of
    their own for some phases:

        init         until `start` returns
        data         between the trainer's calls: preparing data, and the program's own collectives
        step         Trainer.step, evaluate
        checkpoint   Trainer.save, resume

    Attributes:
        limit: seconds, or None: never end the job because of a wait.
        phases: limits by phase, None as above.
        report: seconds of waiting after which a report is printed and the job goes on; None: never. Where the ranks
            turn out to have called different collectives, which cannot end well, the job ends here as well.
        heartbeat: seconds between the lines of a rank that works while the others wait (`on_root`); None: none.
        directory: where reports are written, seen by all ranks; None: the directory in which the job was started.
        debug: compare the ranks' calls before every collective, and raise on all ranks where they differ.
        straggler: steps between two looks at who is slower than the others; 0: never.
    """

    limit: float | None = None
    phases: Mapping[str, float | None] = field(default_factory=dict)
    report: float | None = 120.0
    heartbeat: float | None = 60.0
    directory: str | None = None
    debug: bool = False
    straggler: int = 10

    def __post_init__(self) -> None:
        for phase in self.phases:
            if phase not in PHASES:
                raise ConfigError(f"watch.phases has {phase!r}{nearest(phase, PHASES)}; legal are {choices(PHASES)}")
        seconds = {"limit": self.limit, "report": self.report, "heartbeat": self.heartbeat,
                   **{f"phases[{phase!r}]": value for phase, value in self.phases.items()}}
        for name, value in seconds.items():
            if value is not None and not value > 0:
                raise ConfigError(f"watch.{name} = {value!r} is not legal; legal are seconds above 0, or None (off)")
        if self.straggler < 0:
            raise ConfigError(f"watch.straggler = {self.straggler!r} is not legal; legal are numbers of steps, or 0 "
                              "(off)")

    def limit_of(self, phase: str) -> float | None:
        """Seconds that a rank may wait in one collective in `phase`."""
        return self.phases.get(phase, self.limit)

    @property
    def shortest(self) -> float | None:
        """The shortest time that means anything here, or None when all is off."""
        every = [self.report, self.limit, self.heartbeat, *self.phases.values()]
        return min((value for value in every if value is not None), default=None)

    def overruled(self, limit: float | None, debug: bool | None) -> Watch:
        """With what the environment says, which is nearer to the run than the program."""
        changed = self if limit is None else replace(self, limit=limit)
        return changed if debug is None else replace(changed, debug=debug)
