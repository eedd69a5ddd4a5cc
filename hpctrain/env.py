"""Everything that hpctrain reads from environment variables.

Owns the names of the variables: what a launcher promises to each process, the user's thread counts, and hpctrain's
own switches. No other file reads the environment, and none of these has to be set by hand. Must not know MPI, array
libraries or any other room. Every function is a pure function of a mapping, `os.environ` unless told otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ConfigError

__all__ = ["Launch", "complete_home", "debug", "exception_hook", "hang_limit", "launch", "oddities", "search_path",
           "user_threads"]

Environment = Mapping[str, str]

#: Slurm numbers the steps that are no `srun` (batch script, interactive shell, ...) from here to 2**32 - 1.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_OFF = ("0", "no", "off", "false")

#: The thread counts that a user may have set, the most general one first.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Launch:
    """What the launcher promised to this process: rank `rank` of `size` processes of one job.

    `local_rank` counts within the node and is None where the launcher does not say. `evidence` is the variable that
    named the size, with its value.
    """

    launcher: str
    size: int
    rank: int
    local_rank: int | None
    evidence: str


@dataclass(frozen=True)
class _Dialect:
    """The variables by which one launcher speaks; for each of them, the first name that is set counts."""

    launcher: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]


# Order matters: `mpirun` inside a Slurm allocation starts its helpers through srun, so that ranks see SLURM_* of those
# helpers; what mpirun itself says is nearer to the truth.
_DIALECTS = (
    _Dialect("mpirun (Open MPI)", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",),
             ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    _Dialect("jsrun (LSF)", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_LOCAL_RANK",)),
    _Dialect("mpiexec (PALS)", ("PALS_SIZE",), ("PALS_RANKID",), ("PALS_LOCAL_RANKID",)),
    _Dialect("flux run (Flux)", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",), ("FLUX_TASK_LOCAL_ID",)),
    _Dialect("a PMI launcher (mpiexec of MPICH, Intel MPI, or srun --mpi=pmi2)", ("PMI_SIZE",), ("PMI_RANK",),
             ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")),
    _Dialect("srun (Slurm)", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_PROCID",), ("SLURM_LOCALID",)),
)


def launch(environ: Environment = os.environ) -> Launch | None:
    """What the launcher promises, or None without one (a plain `python`, also one inside an allocation). Local."""
    for dialect in _DIALECTS:
        size, rank = _first(environ, dialect.size), _first(environ, dialect.rank)
        if size is None or rank is None:
            continue
        if dialect.launcher.startswith("srun") and not _is_step(environ):
            continue
        local = _first(environ, dialect.local_rank)
        return Launch(dialect.launcher, size[1], rank[1], None if local is None else local[1], f"{size[0]}={size[1]}")
    return None


def oddities(environ: Environment = os.environ) -> list[str]:
    """Settings that contradict each other without being wrong enough to stop for; one sentence each. Local."""
    tasks, per_node = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_NTASKS_PER_NODE")
    if tasks == 1 and per_node is not None and per_node > 1:
        return [f"SLURM_NTASKS=1 but SLURM_NTASKS_PER_NODE={per_node}: this runs as one rank. If more were meant, "
                f"ask for --ntasks={per_node} (or more) and start the ranks with srun"]
    return []


def user_threads(environ: Environment = os.environ) -> tuple[str, int] | None:
    """The thread count that the user set and its variable's name, or None. Local.

    A list as in OMP_NUM_THREADS=4,2 (nested levels) counts by its first number; anything unreadable as not set.
    """
    for name in _THREAD_VARIABLES:
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return name, int(first)
    return None


def exception_hook(environ: Environment = os.environ) -> bool:
    """Whether an uncaught exception may end the whole job; HPCTRAIN_EXCEPTION_HOOK=0 turns that off. Local."""
    return environ.get("HPCTRAIN_EXCEPTION_HOOK", "1").strip().lower() not in _OFF


def debug(environ: Environment = os.environ) -> bool | None:
    """Whether ranks compare their calls before every collective: HPCTRAIN_DEBUG=1 or 0; None where not set. Local."""
    text = environ.get("HPCTRAIN_DEBUG", "").strip().lower()
    return None if not text else text not in _OFF


def hang_limit(environ: Environment = os.environ) -> float | None:
    """HPCTRAIN_HANG_LIMIT: seconds that a rank may wait in a collective before the job ends; None if not set. Local.

    Raises:
        ConfigError: it is no number above 0. It must be the same on all ranks.
    """
    text = environ.get("HPCTRAIN_HANG_LIMIT", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"HPCTRAIN_HANG_LIMIT = {text!r} is not legal; legal are seconds above 0")
    return seconds


def malloc_is_set(environ: Environment = os.environ) -> bool:
    """Whether the user has set what glibc's malloc keeps and maps (mallopt(3))."""
    return any(name in environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_",
                                            "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"))


def complete_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets HOME to the user's own where it is missing: Open MPI ends a process that has none. Local.

    The one variable that is ever written, to what it would be after a login.
    """
    if not environ.get("HOME"):
        environ["HOME"] = str(Path.home())


def search_path(environ: Environment = os.environ) -> str:
    """The folders in which commands such as mpirun are looked up. Local."""
    return environ.get("PATH", os.defpath)


def _is_step(environ: Environment) -> bool:
    """Whether this process was started by srun; batch scripts and shells in an allocation have SLURM_PROCID=0 too."""
    step = _number(environ, "SLURM_STEP_ID")
    if step is not None and step >= _FIRST_SPECIAL_STEP:
        return False
    return step is not None or "SLURM_STEP_NUM_TASKS" in environ or bool(_number(environ, "SLURM_PROCID"))


def _first(environ: Environment, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = _number(environ, name)
        if value is not None:
            return name, value
    return None


def _number(environ: Environment, name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None
