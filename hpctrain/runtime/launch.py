"""Whether MPI sees the job that the launcher started.

Owns the comparison and its advice. The commonest silent failure on clusters is that a launcher starts N processes and
MPI, built for another launcher, makes each of them a world of its own: N copies of rank 0, each training alone and
writing over the others' files. That is refused here. Must not know engines, transports or configuration.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.env import Launch
from hpctrain.errors import LaunchError

__all__ = ["MpiLibrary", "check", "describe"]


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that this process has loaded. `path` is empty where the system does not tell."""

    vendor: str
    version: str
    path: str

    def __str__(self) -> str:
        """`Open MPI 5.0.11 (/path/libmpi.so.40)`."""
        return f"{self.vendor} {self.version}" + (f" ({self.path})" if self.path else "")


def describe(mpi: Any) -> MpiLibrary:
    """The library behind the module mpi4py.MPI. Local."""
    vendor, version = mpi.get_vendor()
    return MpiLibrary(vendor, ".".join(str(part) for part in version), _mapped_library())


def check(world_size: int, launch: Launch | None, library: MpiLibrary, oddities: list[str]) -> list[str]:
    """Compares MPI's world with what the launcher promised. Local; the outcome is the same on every process.

    Args:
        world_size: number of ranks that MPI sees.
        launch: the promise, None without a launcher.
        library: the MPI library, for the message.
        oddities: contradictions in the environment, from `hpctrain.env.oddities`.

    Returns:
        Warnings, one sentence each.

    Raises:
        LaunchError: a world of one rank where more were promised.
    """
    if launch is None or launch.size == world_size:
        return list(oddities) if world_size == 1 else []
    if world_size == 1:
        raise LaunchError(
            f"{launch.launcher} started {launch.size} processes ({launch.evidence}; this is number {launch.rank}), but "
            "MPI sees a world of 1 rank: each process is a singleton that would train alone. The MPI library in use "
            f"is {library}. {advice(launch, library)} Python is {sys.executable}. `hpctrain doctor`, started "
            "in the same way, shows what each process sees.")
    return [f"{launch.launcher} promised {launch.size} processes ({launch.evidence}) but MPI sees {world_size} ranks; "
            f"going on with {world_size}"]


def advice(launch: Launch, library: MpiLibrary) -> str:
    """What to try, by launcher and library: one or two sentences."""
    mpich_like = library.vendor in ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")
    own = f"the mpirun that belongs to this library ({library.vendor})"
    if launch.launcher.startswith("srun"):
        first, second = ("pmi2", "pmix") if mpich_like else ("pmix", "pmi2")
        return (f"Try `srun --mpi={first}` (`srun --mpi=list` shows what your Slurm has; --mpi={second} or "
                f"--mpi=cray_shasta on some sites), or start with {own} inside the allocation.")
    if launch.launcher.startswith("mpirun"):
        return (f"The mpirun that you called speaks to Open MPI only: call {own}, or install mpi4py for the MPI whose "
                "mpirun you use (docs/on_a_cluster.md).")
    if launch.launcher.startswith("a PMI launcher"):
        return (f"Call {own}; under Slurm try `srun --mpi=pmix` for Open MPI and `srun --mpi=pmi2` for MPICH and Intel "
                "MPI; or install mpi4py for the MPI whose mpiexec you use (docs/on_a_cluster.md).")
    return f"Start with {own}, or install mpi4py for the system's MPI (docs/on_a_cluster.md)."


def _mapped_library() -> str:
    """The file of the loaded libmpi, as far as Linux tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line}
    named = sorted(path for path in paths if Path(path).name.split(".")[0] in ("libmpi", "libmpi_cray", "libmpich"))
    return named[0] if named else ""
