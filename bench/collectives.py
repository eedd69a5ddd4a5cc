"""Collectives in host memory: hpctrain against mpi4py on Open MPI and on MPICH, and torch gloo; where they are
installed also against DeepSpeed's shared-memory all-reduce and Horovod.

    python bench/collectives.py [--ranks 2 4] [--sizes 4096 ...] [--rounds 11]

Contenders alternate sample by sample inside one MPI job, on the same buffers; every result is checked first. MPICH
needs a job of its own, with hpctrain in it too: only ratios within one job mean anything. A sample of a small size is
several calls back to back; the slowest rank counts. `memory floor` is the bytes that must be read and written once over
the copy bandwidth of all ranks together, measured in the same job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Row, report, row, run_job, start_gloo

Call = Callable[[], Any]
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
MPICH = Path(".venv-mpich")
OURS = "hpctrain"

#: Bytes that any algorithm must read once and write once over all p ranks, as a share of all ranks copying the array.
FLOORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 1.0,
    "reduce_scatter": lambda p: (p + 1) / (2 * p),
    "all_gather": lambda p: (p + 1) / (2 * p),
    "broadcast": lambda p: 0.5,
    "all_to_all": lambda p: 1.0,
    "reduce": lambda p: (p + 1) / (2 * p),
}


def tensors(case: Any) -> tuple[Any, Any, Any]:
    """`whole`, `other` and `part` of a case as torch tensors over the same memory."""
    import numpy as np
    import torch

    def tensor(array: Any) -> Any:
        half = case.dtype == "bfloat16"
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16) if half else torch.from_numpy(array)

    return tensor(case.whole), tensor(case.other), tensor(case.part)


def gloo(case: Any, operation: str) -> Call | None:
    """torch.distributed; the process group is there already."""
    import torch.distributed as dist

    whole, other, part = tensors(case)
    own = whole[case.own]
    calls: dict[str, tuple[Call, Any]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), case.whole),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), case.part),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, own), case.whole),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole), case.other),
        "broadcast": (lambda: dist.broadcast(whole, case.root()), case.whole),
        "reduce": (lambda: dist.reduce(whole, case.root()), case.whole if case.group.rank == 0 else None),
    }
    return returning(*calls[operation]) if operation in calls else None


def deepspeed(case: Any, operation: str) -> Call | None:
    """Its shared-memory kernel for inference, which has an all-reduce only."""
    import deepspeed.comm

    if operation != "all_reduce":
        return None
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    whole = tensors(case)[0]
    return returning(lambda: deepspeed.comm.inference_all_reduce(whole), case.whole)


def horovod(case: Any, operation: str) -> Call | None:
    """In-place all-reduce; the operations that it has in place only."""
    import horovod.torch as hvd

    hvd.init()
    whole = tensors(case)[0]
    if operation != "all_reduce":
        return None
    return returning(lambda: hvd.allreduce_(whole, op=hvd.Sum, name=f"{case.dtype} {case.num_bytes}"), case.whole)


def returning(call: Call, result: Any) -> Call:
    """A call that gives the array that it wrote, for the check, whose root is rank 0."""

    def both() -> Any:
        call()
        return result

    return both


PEERS: dict[str, Callable[[Any, str], Call | None]] = {"torch gloo": gloo, "DeepSpeed shm": deepspeed,
                                                       "Horovod": horovod}
PACKAGES = {"DeepSpeed shm": "deepspeed", "Horovod": "horovod"}


def worker(library: str, peers: list[str], works: list[str], rounds: int) -> None:
    """One MPI rank of a job; rank 0 prints the rows. A work is operation:dtype:bytes."""
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
    for operation, dtype, size in (work.split(":") for work in works):
        case = Case(group, operation, dtype, int(size))
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
            print_rows(f"{operation} {dtype} {int(size) >> 10} KiB, {context.size} ranks", library, times, floor)
    if peers:
        import torch.distributed

        torch.distributed.destroy_process_group()


def print_rows(work: str, library: str, times: dict[str, list[float]], floor: list[float]) -> None:
    """Rows of one work as JSON lines: times, then hpctrain's ratio to each of the others within the rounds."""
    rows = [row(f"{work} ({library})", name, "us", (1e6 * t for t in ts)) for name, ts in times.items()]
    others = {name: ts for name, ts in times.items() if name != OURS} | {"memory floor": floor}
    rows += [row(f"{work} ({library})", f"{OURS} / {name}", "ratio", (a / b for a, b in zip(times[OURS], ts)))
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
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=deadline, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Runs all jobs, or one rank of one with --worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", metavar="LIBRARY")
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--works", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", default=list(FLOORS), choices=list(FLOORS))
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
    works = [f"{operation}:float32:{size}" for operation in options.operations for size in options.sizes]
    works += ["all_reduce:bfloat16:16777216"] * ("all_reduce" in options.operations)
    rows: list[Row] = []
    for num_ranks in options.ranks:
        common = [__file__, "--rounds", str(options.rounds), "--works", *works]
        rows += run_job(num_ranks, [*common, "--worker", "Open MPI", "--peers", *peers])
        if (MPICH / "bin" / "mpirun").exists():
            rows += run_mpich(num_ranks, [*common, "--worker", "MPICH"])
    report("collectives", rows)


if __name__ == "__main__":
    main()
