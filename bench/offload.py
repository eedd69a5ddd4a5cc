"""One training step of a GPT with the optimizer's states in memory and in a file of the node.

    python bench/offload.py [--directory DIR]

Contenders alternate step by step in one process, which computes with one thread and may use all cores otherwise. The
disk's own bandwidth is measured beside it, without the page cache, and an update's, which reads and writes all states.
Growths of the resident set, pages of the file included, are those of jobs of one contender each.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Row, alternate, report, row

LAYERS, WIDTH, LENGTH = 8, 512, 128
SEQUENCES = (1, 4)  # of a step: the update takes most of the time, or little of it
OFFLOAD: dict[str, dict[str, Any]] = {
    "memory": {}, "disk": {"states": "disk"}, "disk, update one step late": {"states": "disk", "delay": True,
                                                                             "delay_start": 0},
}
BLOCK = 32 << 20


def make_trainer(contender: str, context: Any, directory: Path) -> Any:
    import torch

    import hpctrain.torch
    from hpctrain.models.gpt import GPT, GPTShape

    torch.manual_seed(0)
    shape = GPTShape(256, context=LENGTH, width=WIDTH, layers=LAYERS, heads=8, positions="learned", tied=False)

    def loss(module: Any, batch: Any) -> Any:
        logits = module(batch[0])
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return total, batch[1].numel()

    offload = {"directory": directory, "window_bytes": 96 << 20, **OFFLOAD[contender]}
    return context.trainer(hpctrain.torch.adapt(GPT(shape), loss), optimizer=hpctrain.AdamW(lr=1e-3),
                           zero=hpctrain.Zero(offload=offload))


class Timed:
    """Seconds of each update of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self._apply = trainer.optimizer.apply
        trainer.optimizer.apply = self.apply
        self.num_bytes = sum(array.nbytes for state in trainer.optimizer.state.values() for array in state)

    def apply(self, *args: Any) -> None:
        start = time.perf_counter()
        self._apply(*args)
        self.seconds.append(time.perf_counter() - start)


def worker(contenders: list[str], directory: Path, rounds: int) -> None:
    """Prints rows: of steps and updates, or with one contender of memory."""
    import torch

    import hpctrain

    context = hpctrain.start()
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainers = {c: make_trainer(c, context, directory) for c in contenders}
    timed = {c: Timed(trainer) for c, trainer in trainers.items()}
    tokens = torch.randint(256, (max(SEQUENCES), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    rows = []
    for sequences in SEQUENCES:
        batch = (tokens[:sequences, :-1].contiguous(), tokens[:sequences, 1:].contiguous())
        calls = {c: (lambda i, t=t, batch=batch: t.step([batch])) for c, t in trainers.items()}
        times = alternate(context.world.barrier, calls, rounds)
        work = f"GPT of 25 M parameters, {sequences} x {LENGTH} tokens"
        rows += [row(f"{work}: step", c, "ms", (1e3 * t for t in ts)) for c, ts in times.items()]
        rows += [row(f"{work}: step / memory", c, "ratio", (a / b for a, b in zip(ts, times["memory"], strict=True)))
                 for c, ts in times.items() if c != "memory" and "memory" in times]
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if len(contenders) == 1:
        rows = [row("GPT of 25 M parameters: growth of the resident set", contenders[0], "MiB", [growth])]
    else:
        rows += [row("update: states read and written", c, "GB/s", (2e-9 * t.num_bytes / s for s in t.seconds[2:]))
                 for c, t in timed.items()]
    for r in rows:
        print(json.dumps(r), flush=True)


def run_alone(arguments: list[str]) -> list[Row]:
    """Runs this program as a job of one process, not bound to a core; returns the rows that it prints."""
    done = subprocess.run([sys.executable, __file__, *arguments], env=dict(os.environ, OMP_NUM_THREADS="1"),
                          stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def disk_rows(directory: Path, rounds: int) -> list[Row]:
    """What the disk itself does: blocks of 32 MiB, written and then read, past the page cache where it allows that."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(1 << 20) * (BLOCK >> 20))
    descriptor, path = tempfile.mkstemp(dir=directory)
    os.close(descriptor)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, os.O_RDWR)
    Path(path).unlink()
    count, seconds = 8, {"written": [], "read": []}
    os.posix_fallocate(descriptor, 0, count * BLOCK)
    for _ in range(rounds + 1):
        for name, call in (("written", os.pwritev), ("read", os.preadv)):
            start = time.perf_counter()
            for i in range(count):
                call(descriptor, [block], i * BLOCK)
            seconds[name].append(time.perf_counter() - start)
    os.close(descriptor)
    size = 1e-9 * count * BLOCK
    return [*(row(f"the disk itself: {name}", "O_DIRECT", "GB/s", (size / s for s in all_s[1:]))
              for name, all_s in seconds.items()),
            row("the disk itself: read and written", "O_DIRECT", "GB/s",
                (2 * size / (a + b) for a, b in zip(*(s[1:] for s in seconds.values()), strict=True)))]


def main() -> None:
    """Runs all jobs, or one with --worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs="+", metavar="CONTENDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk that is measured")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.directory, options.rounds)
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    more = ["--directory", str(options.directory), "--worker"]
    rows = disk_rows(options.directory, options.rounds)
    rows += run_alone(["--rounds", str(options.rounds), *more, *OFFLOAD])
    for contender in OFFLOAD:
        rows += run_alone(["--rounds", "2", *more, contender])
    report("offload", rows)


if __name__ == "__main__":
    main()
