"""`hpctrain doctor`: one table of what every rank sees, and what looks wrong, before a job is queued for hours.

Owns the questions, their wording and the remedies. Works alone, under any launcher, and without torch, CuPy or even
MPI; imports torch and CuPy only where the machine has a device for them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from hpctrain import env
from hpctrain.runtime.cores import spans

__all__ = ["doctor", "mpirun_warning", "rows"]

#: Files whose presence says that a GPU driver is there (NVIDIA, AMD).
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")


def doctor() -> None:
    """Shows MPI, launcher, world, hosts, cores, threads and libraries of all ranks in one table. Collective."""
    launch = env.launch()
    first = launch is None or launch.rank == 0
    mpirun = _mpirun() if first else ("", "")  # before MPI starts: no process may be forked afterwards

    from hpctrain.runtime.context import start

    context = start(strict=False)
    facts = _facts(context)
    everybody = context.world.exchange(facts)
    if context.rank == 0 and first:
        warnings = [*context.warnings, *context.crowding]
        if context.library is not None:
            warnings += mpirun_warning(mpirun, context.library.vendor)
        found = " of ".join(part for part in mpirun if part) or "none"
        _print([*rows(everybody), ("mpirun on PATH", found, "0")], warnings)
    context.close()


def rows(everybody: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The table: (fact, value, ranks that see it so), each distinct value once. Pure."""
    result = []
    for name in everybody[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(everybody):
            ranks_of.setdefault(facts[name], []).append(rank)
        for value, ranks in ranks_of.items():
            result.append((name, value, "all" if len(ranks) == len(everybody) else spans(ranks)))
    return result


def mpirun_warning(mpirun: tuple[str, str], vendor: str) -> list[str]:
    """A sentence if the mpirun on the search path, (file, vendor), is not of the MPI library in use. Pure."""
    file, other = mpirun
    if not other or not vendor or other == vendor:
        return []
    return [f"mpirun on PATH is {file} of {other}, but mpi4py has loaded {vendor}: ranks started by it would each be "
            f"alone. Call the mpirun of {vendor}, or install mpi4py for {other} (docs/on_a_cluster.md)"]


def _facts(context: Any) -> dict[str, Any]:
    """What this rank sees, as text. Local."""
    from hpctrain.runtime.threads import allowed_cores

    launch, library = context.launch, context.library
    promise = "none (plain python)" if launch is None else f"{launch.launcher}, {launch.evidence}"
    return {
        "launcher": promise,
        "world": f"{context.size} rank{'s' if context.size != 1 else ''}",
        "host": context.host,
        "MPI": "none" if library is None else str(library),
        "MPI threads": "" if library is None else _thread_level(),
        "mpi4py": _version("mpi4py"),
        "allowed cores": spans(allowed_cores()),
        "threads a rank": str(context.threads),
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "hpctrain": _version("hpctrain"),
        "numpy": _version("numpy"),
        "h5py": _hdf5(),
        "torch": _version("torch"),
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "devices": _devices(),
    }


def _thread_level() -> str:
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
              MPI.THREAD_MULTIPLE: "multiple"}
    return levels[MPI.Query_thread()]


def _version(*packages: str) -> str:
    """The version of the first of these that is installed; does not import it."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _hdf5() -> str:
    try:
        h5py = import_module("h5py")
    except ImportError as error:
        return f"cannot be imported: {error}"
    return f"{h5py.__version__}, HDF5 {h5py.version.hdf5_version}, MPI {'yes' if h5py.get_config().mpi else 'no'}"


def _devices() -> str:
    """The GPUs that this rank may use; asks the libraries only where a driver is present."""
    if not any(Path(file).exists() for file in _DEVICE_FILES):
        return "none (no GPU driver)"
    try:
        cuda = import_module("torch").cuda
        names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    except (ImportError, RuntimeError) as error:
        return f"a driver, but torch cannot use it: {error}"
    return ", ".join(names) or "a driver, but no device for torch"


def _mpirun() -> tuple[str, str]:
    """(file, vendor) of the mpirun that a user would call; vendor is empty if it does not say."""
    file = shutil.which("mpirun", path=env.search_path())
    if file is None:
        return "", ""
    try:
        run = subprocess.run([file, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return file, ""
    text = run.stdout + run.stderr
    for sign, vendor in (("Open MPI", "Open MPI"), ("Intel(R) MPI", "Intel MPI"), ("HYDRA", "MPICH")):
        if sign in text:
            return file, vendor
    return file, ""


def _print(table_rows: Sequence[tuple[str, str, str]], warnings: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("what", "value", "ranks", title="hpctrain doctor")
    for row in table_rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for text in warnings:
        console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False)
    if not warnings:
        console.print("nothing looks wrong")
