"""Collectives and messages in host memory: hpctrain against mpi4py on Open MPI and on MPICH, and torch gloo; where they
are installed also against DeepSpeed's shared-memory all-reduce and Horovod.

    python bench/collectives.py [--quick] [--ranks 2 4] [--sizes 4096 ...] [--rounds 11]

Contenders alternate sample by sample inside one MPI job, on the same buffers; every result is checked first. MPICH
needs a job of its own, with hpctrain in it too: only ratios within one job mean anything. A sample of a small size is
several calls back to back; the slowest rank counts. Works called `ordinary` are on buffers of NumPy, all others on
those of hpctrain's transport. `memory floor` is the bytes that must be read and written once over the copy bandwidth of
all ranks together, measured in the same job. bench/ratio_table.py makes tables of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from harness import Row, report, row, run_job, start_gloo
from peers import PACKAGES, PEERS

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK_SIZES = [4 << 10, 1 << 20]
MPICH = Path(".venv-mpich")
OURS = "hpctrain"

#: Bytes that any algorithm must read once and write once over all p ranks, as a share of all ranks copying the array.
#: An all-gather finds each rank's own part in place; a message there and back is copied twice.
FLOORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 1.0,
    "reduce_scatter": lambda p: (p + 1) / (2 * p),
    "all_gather": lambda p: 0.5,
    "broadcast": lambda p: 0.5,
    "all_to_all": lambda p: 1.0,
    "reduce": lambda p: (p + 1) / (2 * p),
    "scatter": lambda p: 1 / p,
    "gather": lambda p: 1 / p,
    "send_recv": lambda p: 2 / p,
}


def worker(library: str, peers: list[str], works: list[str], rounds: int) -> None:
    """One MPI rank of a job; rank 0 prints the rows. A work is operation:dtype:bytes:buffers."""
    from mpi4py import MPI

    import hpctrain
    from hpctrain.arrays import arrays_of
    from hpctrain.bench.contenders import Case
    from hpctrain.bench.measure import alternate, copy_seconds
    from hpctrain.collectives import Group
    from hpctrain.collectives.choose import Chooser

    warnings.simplefilter("ignore")  # torch calls its own collectives deprecated, once a call
    context = hpctrain.start()
    transport = context.world.transport.subgroup(range(context.size))
    group, mpi = Group(transport, arrays_of, chooser=Chooser()), f"mpi4py ({library})"
    if peers:
        start_gloo(context)
    for operation, dtype, size, buffers in (work.split(":") for work in works):
        case = Case(group, operation, dtype, int(size), ordinary=buffers == "ordinary")
        found = {OURS: case.ours(), mpi: case.native(MPI.COMM_WORLD)}
        found |= {name: PEERS[name](case, operation) for name in peers}
        calls = {name: call for name, call in found.items() if call is not None}
        for name, call in calls.items():
            with group.agree():
                try:
                    case.check(call)
                except ArithmeticError as error:
                    raise RuntimeError(f"{operation} of {size} bytes of {dtype} by {name}: {error}") from error
        times = alternate(group, calls, rounds)
        copy = copy_seconds(group, case.num_bytes, rounds)
        if context.rank == 0:
            floor = [FLOORS[operation](context.size) * t for t in copy]
            kind = " ordinary" if case.ordinary else ""
            name = f"{operation}{kind} {dtype} {int(size) >> 10} KiB, {context.size} ranks ({library})"
            print_rows(name, times, floor)
    if peers:
        import torch.distributed

        torch.distributed.destroy_process_group()


def print_rows(work: str, times: dict[str, list[float]], floor: list[float]) -> None:
    """Rows of one work as JSON lines: times, then hpctrain's ratio to each of the others within the rounds."""
    rows = [row(work, name, "us", (1e6 * t for t in ts)) for name, ts in times.items()]
    others = {name: ts for name, ts in times.items() if name != OURS} | {"memory floor": floor}
    rows += [row(work, f"{OURS} / {name}", "ratio", (a / b for a, b in zip(times[OURS], ts)))
             for name, ts in others.items()]
    for r in rows:
        print(json.dumps(r), flush=True)


def run_mpich(num_ranks: int, arguments: list[str], deadline: float = 900.0) -> list[Row]:
    """As `harness.run_job`, on MPICH: the same Python, the library and the launcher of the other environment."""
    cores = len(os.sched_getaffinity(0))
    environment = dict(os.environ, MPI4PY_MPIABI="mpich", LD_LIBRARY_PATH=str(MPICH.resolve() / "lib"),
                       OMP_NUM_THREADS="1")
    command = [str(MPICH / "bin" / "mpirun"), "-bind-to", "core" if num_ranks <= cores else "none", "-n",
               str(num_ranks), sys.executable, *arguments]
    with tempfile.TemporaryDirectory() as own:
        done = subprocess.run(command, env=environment | {"TMPDIR": own}, stdout=subprocess.PIPE, text=True,
                              timeout=deadline, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def works_of(operations: list[str], sizes: list[int], ordinary: list[int]) -> list[str]:
    """All works of a job."""
    works = [f"{operation}:float32:{size}:allocate" for operation in operations for size in sizes]
    works += [f"{operation}:float32:{size}:ordinary" for operation in operations for size in ordinary]
    return works + ["all_reduce:bfloat16:16777216:allocate"] * ("all_reduce" in operations)


def main() -> None:
    """Runs all jobs, or one rank of one with --worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", metavar="LIBRARY")
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--works", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--ordinary-sizes", type=int, nargs="*", help="those of --sizes by default")
    parser.add_argument("--operations", nargs="+", default=list(FLOORS), choices=list(FLOORS))
    parser.add_argument("--quick", action="store_true", help="two small sizes only")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.peers, options.works, options.rounds)
        return
    missing = [name for name, package in PACKAGES.items() if find_spec(package) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    if not (MPICH / "bin" / "mpirun").exists():
        print(f"no MPICH in {MPICH} (make {MPICH}/bin/mpirun), left out")
    peers = [name for name in PEERS if name not in missing]
    sizes = QUICK_SIZES if options.quick else options.sizes
    ordinary = sizes if options.ordinary_sizes is None else options.ordinary_sizes
    works = works_of(options.operations, sizes, ordinary)
    rows: list[Row] = []
    for num_ranks in options.ranks:
        common = [__file__, "--rounds", str(options.rounds), "--works", *works]
        rows += run_job(num_ranks, [*common, "--worker", "Open MPI", "--peers", *peers])
        if (MPICH / "bin" / "mpirun").exists():
            rows += run_mpich(num_ranks, [*common, "--worker", "MPICH"])
        report("collectives-quick" if options.quick else "collectives", rows)  # what is there, should the next job fail


if __name__ == "__main__":
    main()
