"""What all benchmarks share: starting MPI jobs, alternating contenders, rows, tables.

A row is {work, contender, unit, median, low, high, runs}; low and high are the quartiles. Each benchmark writes its
rows to build/bench/NAME.json and prints them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def row(work: str, contender: str, unit: str, samples: Iterable[float]) -> Row:
    """One row from samples."""
    values = sorted(samples)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"work": work, "contender": contender, "unit": unit, "median": round(median, 4), "low": round(low, 4),
            "high": round(high, 4), "runs": len(values)}


def run_job(num_ranks: int, arguments: list[str], deadline: float = 900.0) -> list[Row]:
    """Runs `python arguments` on MPI ranks of this environment; returns the JSON rows printed by rank 0.

    Ranks are bound to cores while there are enough (Open MPI's --oversubscribe switches its binding off).
    """
    cores = len(os.sched_getaffinity(0))
    binding = ["--bind-to", "core"] if num_ranks <= cores else ["--oversubscribe", "--bind-to", "none"]
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
    command = [mpirun, *binding, "-n", str(num_ranks), sys.executable, *arguments]
    with tempfile.TemporaryDirectory() as own:  # files of a killed mpirun would be in the way of a later one
        done = subprocess.run(command, env=environment | {"TMPDIR": own}, stdout=subprocess.PIPE, text=True,
                              timeout=deadline, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def alternate(barrier: Callable[[], None], contenders: dict[str, Callable[[int], None]], rounds: int,
              warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each contender's call, `rounds` of them, all contenders in each round, the first one rotating."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + warmup):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            barrier()
            start = time.perf_counter()
            contenders[name](i)
            elapsed = time.perf_counter() - start
            if i >= warmup:
                times[name].append(elapsed)
    return times


def start_gloo(context: Any) -> None:
    """torch.distributed on the loopback device, at a port that rank 0 finds free; also sets what other peers read."""
    import torch.distributed

    def free_port() -> int:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    port = context.world.on_root(free_port)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      RANK=str(context.rank), WORLD_SIZE=str(context.size), LOCAL_RANK=str(context.rank))
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=context.rank, world_size=context.size)
    torch.set_num_threads(1)


def report(name: str, rows: list[Row]) -> None:
    """Writes build/bench/NAME.json and prints the table."""
    path = Path("build/bench") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(title=f"{name} ({path})")
    for column in ("work", "contender", "median", "quartiles", "unit", "runs"):
        table.add_column(column, justify="left" if column in ("work", "contender", "unit") else "right")
    for r in rows:
        table.add_row(r["work"], r["contender"], f"{r['median']:.4g}", f"{r['low']:.4g} .. {r['high']:.4g}", r["unit"],
                      str(r["runs"]))
    Console(width=140).print(table)
