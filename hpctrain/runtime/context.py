"""The start of a job in one process: who am I, who else is there, what may I use.

Owns `start` and the Context that it returns. Joins the MPI transport (or a world of one without MPI) with the
collectives, after comparing MPI's world with the launcher's promise. Must not know models, data or configuration;
the training step lives in its own file.
"""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpctrain import env, log
from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.choice_file import read_text
from hpctrain.collectives.choose import Chooser
from hpctrain.contracts import Model, Transport
from hpctrain.errors import LaunchError
from hpctrain.runtime import abort
from hpctrain.runtime.cores import crowding
from hpctrain.runtime.launch import MpiLibrary, check, describe
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.oversight import Oversight
from hpctrain.runtime.signals import Signals
from hpctrain.runtime.threads import Threads, allowed_cores, fair_share

if TYPE_CHECKING:
    from hpctrain.runtime.step import Trainer

__all__ = ["Context", "start"]


class Context:
    """One process of a running job. Made by `start`, one a process; all its attributes are read-only data.

    Attributes:
        world: the group of all ranks, with the collectives.
        rank, size: this process in it, and how many there are.
        local_rank, local_size: the same within this node.
        num_nodes: nodes of the job, where its ranks are numbered node by node; else 1.
        host: the node's name.
        threads: threads that each array library uses for one operation here.
        signals: the stop signals; watched from the first `trainer()` on, or from `signals.install()`.
        launch: what the launcher promised, or None.
        library: the MPI library, or None in a world of one without MPI.
        warnings: what looked odd about the launch, printed by rank 0.
        crowding: a sentence for each node whose ranks may run on the same core, printed by rank 0.
        watch: how long this job's ranks may wait for each other.
        recorder: this rank's last collectives and the phase that it is in.
    """

    def __init__(self, transport: Transport, library: MpiLibrary | None, warnings: Sequence[str] = (),
                 oversight: Oversight | None = None) -> None:
        """Collective over all ranks of `transport`."""
        self._oversight = oversight or Oversight()
        self.watch, self.recorder = self._oversight.watch, self._oversight.recorder
        self.warnings = tuple(warnings)
        user = env.user_threads()
        allowed = allowed_cores()
        self._threads = Threads(user[1] if user else 1, allowed, user[0] if user else None)
        self.world = Group(transport, self._threads.watching(arrays_of), chooser=Chooser(),
                           observer=self._oversight.observer(transport))
        self.rank, self.size = transport.rank, transport.size
        self.num_nodes = self.world.num_nodes()  # asks the others once: now, not inside somebody's first collective
        self.host = socket.gethostname()
        self.launch = env.launch()
        self.library = library
        self.signals = Signals()
        log.identify(self.rank, self.size, self.host)
        self.local_rank, core_sets = self._node(allowed)
        self.local_size = len(core_sets)
        own = crowding(self.host, transport.node_ranks(), core_sets) if self.local_rank == 0 else ""
        self.crowding = tuple(text for text in self.world.exchange(own) if text)
        if user is None:
            self._threads.count = fair_share(core_sets, self.local_rank)
        self._threads.apply_to_loaded(arrays_of)
        self._announce(allowed)
        self._oversight.join(self.world)

    @property
    def threads(self) -> int:
        """Threads that each array library uses for one operation on this rank."""
        return self._threads.count

    @property
    def stop_requested(self) -> bool:
        """Whether this rank got a signal to stop. Local: what to do about it, all ranks decide together."""
        return self.signals.requested

    def trainer(self, model: Model, **options: Any) -> Trainer:
        """A `hpctrain.runtime.step.Trainer` of `model` on this job; see there for the options. Collective.

        From here on stop signals (SIGTERM, the first Ctrl-C, SIGUSR1, SIGUSR2) only set a flag, which comes back as
        `stop` from the next step: save, and leave the loop.
        """
        from hpctrain.runtime.step import Trainer

        self._threads.apply(model.arrays)
        self.signals.install()
        return Trainer(self, model, **options)

    def description(self) -> dict[str, Any]:
        """Where and with what this rank runs, as plain values for a checkpoint or a report. Local."""
        return {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "host": self.host,
            "ranks": self.size,
            "threads": self.threads,
            "mpi": "none" if self.library is None else str(self.library),
            "launcher": "none" if self.launch is None else self.launch.launcher,
        }

    def close(self) -> None:
        """Ends the use of the job: handlers restored, communicators freed. Collective over all ranks."""
        if self in _running:
            _running.remove(self)
            with contextlib.suppress(ValueError):  # not the main thread
                self.signals.close()
            self.world.close()
            self._oversight.close()

    def __enter__(self) -> Context:
        """The context itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Closes, but not after an exception: the other ranks may be anywhere and would never come."""
        if kind is None:
            self.close()

    def _node(self, allowed: frozenset[int]) -> tuple[int, list[list[int]]]:
        """(local rank, core set of each rank of this node). Collective over all ranks."""
        node = self.world.subgroup(self.world.transport.node_ranks())
        assert node is not None, "node_ranks() must hold the rank itself"
        core_sets = node.exchange(sorted(allowed))
        local_rank = node.rank
        node.close()
        return local_rank, core_sets

    def _announce(self, allowed: frozenset[int]) -> None:
        chosen = self._threads.user_variable
        why = f"{chosen} is set" if chosen else f"allowed cores: {len(allowed)}, ranks on this node: {self.local_size}"
        log.once(f"hpctrain: ranks: {self.size}; threads per rank: {self.threads} ({why})")


_running: list[Context] = []


def start(*, strict: bool = True, watch: Watch | None = None, algorithms: str | Path | None = None) -> Context:
    """Starts (or returns) this process's part of the job. Collective over all ranks the first time, then local.

    Works under every MPI launcher, and under plain `python` as one rank, with MPI or without.

    Args:
        strict: refuse a launch that cannot be right. `hpctrain doctor` turns this off, to describe it.
        watch: how long ranks may wait for each other, and what is said then (see `Watch`); the same on all ranks.
        algorithms: a table made by `hpctrain bench tune`, read by rank 0, that chooses the collectives' algorithms;
            the shipped one where it has no row.

    Raises:
        ConfigError: `algorithms` is not such a table. On all ranks alike.
        LaunchError: MPI cannot be loaded though a launcher promised several ranks, or sees only one of them.
    """
    if _running:
        return _running[0]
    abort.install()
    allowed = allowed_cores()
    launch = env.launch()
    oversight = Oversight(watch, launch)
    env.complete_home()
    try:
        mpi = oversight.mpi_waits_for_all_ranks_to_start(_load_mpi)
    except (ImportError, RuntimeError, OSError) as error:
        transport, library, warnings = _without_mpi(error, launch, strict), None, env.oddities()
    else:
        library = describe(mpi)
        warnings = _examine(mpi.COMM_WORLD.Get_size(), launch, library, strict)
        transport = _with_mpi(mpi)
    Threads(1, allowed).restore("MPI")
    context = Context(transport, library, warnings, oversight)
    if context.rank == 0 and strict:
        for line in warnings:
            log.once(line, level=log.WARNING)
        if context.crowding:
            more = len(context.crowding) - 1
            log.once(f"hpctrain: {context.crowding[0]}" + f" ({more} more nodes are alike)" * (more > 0))
    if algorithms is not None:
        text = context.world.on_root(lambda: read_text(algorithms))
        context.world.choose_by(Chooser.parse(text, source=str(algorithms)))
    _running.append(context)
    return context


def _load_mpi() -> Any:
    """Starts MPI. Collective over all ranks."""
    from mpi4py import MPI

    return MPI


def _examine(size: int, launch: env.Launch | None, library: MpiLibrary, strict: bool) -> list[str]:
    try:
        return check(size, launch, library, env.oddities())
    except LaunchError as error:
        if strict:
            raise
        return [str(error)]


def _with_mpi(mpi: Any) -> Transport:
    """Collective over all ranks."""
    from hpctrain.transport.mpi import MpiTransport

    if mpi.COMM_WORLD.Get_size() > 1:
        abort.watch(mpi.COMM_WORLD.Dup())
    return MpiTransport(mpi.COMM_WORLD)


def _without_mpi(error: Exception, launch: env.Launch | None, strict: bool) -> Transport:
    """A world of one; local."""
    from hpctrain.transport.threads import single

    if launch is not None and launch.size > 1 and strict:
        raise LaunchError(
            f"{launch.launcher} started {launch.size} processes ({launch.evidence}) but MPI cannot be loaded here: "
            f"{error}. Install an MPI and mpi4py for it (docs/on_a_cluster.md), or load the module that has them."
        ) from error
    log.once(f"hpctrain: no MPI here ({str(error).splitlines()[0] if str(error) else type(error).__name__}); one rank")
    return single()
