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
from hpctrain.collectives.progress import Progress
from hpctrain.contracts import Arrays, Model, Transport
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.runtime import abort
from hpctrain.runtime.cores import crowding, fair_shares
from hpctrain.runtime.heap import keep_freed_memory
from hpctrain.runtime.launch import MpiLibrary, check, describe
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.oversight import Oversight
from hpctrain.runtime.signals import Signals
from hpctrain.runtime.threads import Threads, allowed_cores, fair_share

if TYPE_CHECKING:
    from hpctrain.runtime.pipeline_options import Pipeline
    from hpctrain.runtime.pipeline_trainer import PipelineTrainer
    from hpctrain.runtime.pipelined import StageModels
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
                 oversight: Oversight | None = None, *, imitated: bool = False) -> None:
        """Collective over all ranks of `transport`; `imitated`: its nodes are parts of real ones."""
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
        host = self._host(allowed) if imitated else (self.local_rank, core_sets)
        own = crowding(self.host, transport.node_ranks(), core_sets) if self.local_rank == 0 else ""
        self.crowding = tuple(text for text in self.world.exchange(own) if text)
        if user is None:
            self._threads.count = fair_share(host[1], host[0])
        self._threads.apply_to_loaded(arrays_of)
        self._announce(allowed)
        self._progress: Progress | None = None
        self._has_core = fair_shares(host[1])[host[0]] >= 1
        self.world.share_core(not self._has_core)
        self._oversight.join(self.world)

    @property
    def threads(self) -> int:
        """Threads that each array library uses for one operation on this rank."""
        return self._threads.count

    @property
    def stop_requested(self) -> bool:
        """Whether this rank got a signal to stop. Local: what to do about it, all ranks decide together."""
        return self.signals.requested

    def progress(self, wanted: bool | None = None) -> bool:
        """Whether collectives under way move on by a thread of their own from now on, as `wanted` if possible. Local.

        None: where this rank has a core of its own; ranks that share one would take it from each other. Holds for the
        world and for subgroups made from now on. Where the transport bears one thread only (an MPI that grants less
        than MPI_THREAD_MULTIPLE), they move on in this rank's calls alone, and rank 0 says so.
        """
        possible = self.size > 1 and self.world.transport.concurrent
        wanted = self._has_core if wanted is None else wanted
        if wanted and self.size > 1 and not possible:
            log.once(f"hpctrain: no progress thread, since {self.library or 'this transport'} grants less than "
                     "MPI_THREAD_MULTIPLE; collectives under way move on only while a rank is in a call")
        if (wanted and possible) != (self._progress is not None):
            if self._progress is not None:
                self._progress.close()
            self._progress = Progress() if wanted else None
            self.world.progress_by(self._progress)
        return self._progress is not None

    def limit_threads(self, arrays: Arrays) -> None:
        """Gives a library this rank's number of threads, as every trainer does. Local."""
        self._threads.apply(arrays)

    def trainer(self, model: Model, **options: Any) -> Trainer:
        """A `hpctrain.runtime.step.Trainer` of `model` on this job; see there for the options. Collective.

        From here on stop signals (SIGTERM, the first Ctrl-C, SIGUSR1, SIGUSR2) only set a flag, which comes back as
        `stop` from the next step: save, and leave the loop.
        """
        from hpctrain.runtime.step import Trainer

        self._threads.apply(model.arrays)
        self.signals.install()
        return Trainer(self, model, **options)

    def pipeline(self, stages: StageModels, pipeline: Pipeline, *, trace: bool = False,
                 **options: Any) -> PipelineTrainer:
        """A `hpctrain.runtime.pipeline_trainer.PipelineTrainer` of `stages` on this job; see there. Collective.

        For schedules that update while micro-batches are under way a `hpctrain.runtime.stale.StaleTrainer`. Stop
        signals as in `trainer`.
        """
        from hpctrain.runtime.pipeline_trainer import PipelineTrainer
        from hpctrain.runtime.stale import StaleTrainer

        self.signals.install()
        kind = StaleTrainer if pipeline.is_stale(self.size) else PipelineTrainer
        made = kind(self, stages, pipeline, trace=trace, **options)
        self._threads.apply(made.model.arrays)
        return made

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
            if self._progress is not None:
                self._progress.close()  # before what it uses
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

    def _host(self, allowed: frozenset[int]) -> tuple[int, list[list[int]]]:
        """The same of the real node, whose cores all its ranks share. Collective over all ranks."""
        told = self.world.exchange((self.host, sorted(allowed)))
        here = [rank for rank, (host, _) in enumerate(told) if host == self.host]
        return here.index(self.rank), [told[rank][1] for rank in here]

    def _announce(self, allowed: frozenset[int]) -> None:
        chosen = self._threads.user_variable
        why = f"{chosen} is set" if chosen else f"allowed cores: {len(allowed)}, ranks on this node: {self.local_size}"
        log.once(f"hpctrain: ranks: {self.size}; threads per rank: {self.threads} ({why})")


_running: list[Context] = []


def start(*, strict: bool = True, watch: Watch | None = None, algorithms: str | Path | None = None,
          ranks_per_node: int | None = None, progress: bool | None = None, keep_memory: bool = True) -> Context:
    """Starts (or returns) this process's part of the job. Collective over all ranks the first time, then local.

    Works under every MPI launcher, and under plain `python` as one rank, with MPI or without.

    Args:
        strict: refuse a launch that cannot be right. `hpctrain doctor` turns this off, to describe it.
        watch: how long ranks may wait for each other, and what is said then (see `Watch`); the same on all ranks.
        algorithms: a table made by `hpctrain bench tune`, read by rank 0, that chooses the collectives' algorithms;
            the shipped one where it has no row.
        ranks_per_node: so many consecutive ranks of a node count as a node of their own; the same on all ranks. For
            NUMA domains, between which memory is better not shared, and to imitate several nodes on one, for tests and
            for a choice of algorithms.
        progress: move collectives under way on by a thread of this process (see `Context.progress`).
        keep_memory: what is freed stays with this process, so that a step need not ask the system for what the one
            before had (`heap`).

    Raises:
        ConfigError: `algorithms` is not such a table, `ranks_per_node` no number of ranks, or not the same on all
            ranks. On all ranks alike.
        LaunchError: MPI cannot be loaded though a launcher promised several ranks, or sees only one of them.
    """
    if _running:
        return _running[0]
    abort.install()
    if keep_memory:
        keep_freed_memory()
    allowed = allowed_cores()
    launch = env.launch()
    oversight = Oversight(watch, launch)
    env.complete_home()
    try:
        mpi = oversight.mpi_waits_for_all_ranks_to_start(_load_mpi)
    except (ImportError, RuntimeError, OSError) as error:
        _check_ranks_per_node([ranks_per_node])
        transport, library, warnings = _without_mpi(error, launch, strict), None, env.oddities()
    else:
        library = describe(mpi)
        warnings = _examine(mpi.COMM_WORLD.Get_size(), launch, library, strict)
        transport = _with_mpi(mpi, ranks_per_node)
    Threads(1, allowed).restore("MPI")
    context = Context(transport, library, warnings, oversight, imitated=ranks_per_node is not None)
    if context.rank == 0 and strict:
        for line in warnings:
            log.once(line, level=log.WARNING)
        if context.crowding:
            more = len(context.crowding) - 1
            log.once(f"hpctrain: {context.crowding[0]}" + f" ({more} more nodes are alike)" * (more > 0))
    if algorithms is not None:
        text = context.world.on_root(lambda: read_text(algorithms))
        context.world.choose_by(Chooser.parse(text, source=str(algorithms)))
    context.progress(progress)
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


def _check_ranks_per_node(values: Sequence[Any]) -> None:
    """Refuses what the ranks gave; the same on all of them."""
    for rank, value in enumerate(values):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"ranks_per_node = {value!r} on rank {rank}; legal are whole numbers from 1 up, or None")
        if value != values[0]:
            raise ConfigError(f"ranks_per_node = {value!r} on rank {rank}, but {values[0]!r} on rank 0; legal is one "
                              "number, or None, on all ranks")


def _with_mpi(mpi: Any, ranks_per_node: int | None) -> Transport:
    """Collective over all ranks."""
    from hpctrain.transport.mpi import MpiTransport

    _check_ranks_per_node(mpi.COMM_WORLD.allgather(ranks_per_node))
    if mpi.COMM_WORLD.Get_size() > 1:
        abort.watch(mpi.COMM_WORLD.Dup())
    return MpiTransport(mpi.COMM_WORLD, ranks_per_node=ranks_per_node)


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
