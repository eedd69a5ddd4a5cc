"""A model whose optimizer states do not fit into the memory of the job trains with them on disk, and a kill leaves no
file.

Memory is limited by a control group of the test's own where it may make one (there the kernel ends a job that needs
more, page cache included); in any case each job tells its largest resident set, which counts pages of mapped files.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.jobs import Finished, python

MIB = 1 << 20
LIMIT = 450 * MIB
LAYERS, WIDTH = 16, 2048
STATES = 2 * 4 * LAYERS * WIDTH**2  # bytes: 512 MiB
SLOWDOWN = 15  # what a step may take longer, on a disk that others use too

PROGRAM = """
import resource, sys, time
from pathlib import Path
import numpy as np
import hpctrain, hpctrain.numpy as n

LAYERS, WIDTH = LAYERS_WIDTH
places, directory, group, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
if group != "-":
    (Path(group) / "cgroup.procs").write_text("0")
context = hpctrain.start()
random = np.random.default_rng(0)
layers = []
for _ in range(LAYERS):
    weight = random.random((WIDTH, WIDTH), dtype=np.float32)
    weight -= 0.5
    weight *= 0.05
    layers += [n.Linear(n.Parameter(weight)), n.Tanh()]
model = n.network(layers, n.cross_entropy)
offload = {"directory": directory, "window_bytes": 2**26}
offload |= {} if places == "-" else dict.fromkeys(places.split(","), "disk")
trainer = context.trainer(model, optimizer=hpctrain.AdamW(lr=1e-4), clip_norm=1.0,
                          zero=hpctrain.Zero(3, "none", offload=offload))
del layers, weight
for i in range(steps):
    start = time.perf_counter()
    loss = trainer.step([(random.random((2, WIDTH), dtype=np.float32), np.array([1, 2]))]).loss
    seconds = time.perf_counter() - start
    print("step", loss.hex(), seconds, flush=True)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
""".replace("LAYERS_WIDTH", f"{LAYERS}, {WIDTH}")


@pytest.fixture
def group() -> Iterator[str]:
    """The directory of a control group with LIMIT bytes of memory, or "-": this process may make none."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    made = (root if v2 else root / "memory") / f"hpctrain-test-{os.getpid()}"
    limit = made / ("memory.max" if v2 else "memory.limit_in_bytes")
    try:
        made.mkdir()
        limit.write_text(str(LIMIT))
    except OSError:
        if made.exists():
            made.rmdir()
        yield "-"
        return
    yield str(made)
    made.rmdir()


def train(program: str, folder: Path, places: str, group: str, steps: int = 3) -> Finished:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    return python([program, places, str(disk), group, str(steps)], folder, environ={"OMP_NUM_THREADS": "1"}).finish()


def numbers(job: Finished) -> tuple[list[str], float, int]:
    """Losses, seconds of the fastest step after the first, bytes of the largest resident set."""
    steps = [line.split() for line in job.stdout.splitlines() if line.startswith("step")]
    peak = next(int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("peak"))
    return [loss for _, loss, _ in steps], min(float(seconds) for _, _, seconds in steps[1:]), peak


def test_states_that_exceed_the_memory_train_from_disk(script, tmp_path, group, capsys):
    assert STATES > LIMIT
    program = script(PROGRAM)
    free = train(program, tmp_path, "-", "-")
    assert free.code == 0, free.text
    truth, plain_seconds, plain_peak = numbers(free)
    assert plain_peak > LIMIT, "without offload it needs more"
    if group != "-":
        killed = train(program, tmp_path, "-", group)
        assert killed.code != 0 and "peak" not in killed.stdout, killed.text
    job = train(program, tmp_path, "states,gradients,parameters", group)
    assert job.code == 0, job.text
    losses, seconds, peak = numbers(job)
    assert losses == truth, "bit by bit the same"
    assert peak < LIMIT, f"{peak / MIB:.0f} MiB"
    assert seconds < SLOWDOWN * plain_seconds
    how = "counted" if group == "-" else "enforced"
    with capsys.disabled():
        print(f"\n{STATES / MIB:.0f} MiB of states, limit {LIMIT / MIB:.0f} MiB ({how}): peak {peak / MIB:.0f} MiB "
              f"instead of {plain_peak / MIB:.0f}, step {seconds:.2f} s instead of {plain_seconds:.2f}, "
              f"{seconds / plain_seconds:.1f} times as long")


def test_a_kill_leaves_no_file(script, tmp_path):
    """Blocks without a name belong to their process, and are free when it is gone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    job = python([script(PROGRAM), "states", str(disk), "-", "100000"], tmp_path, environ={"OMP_NUM_THREADS": "1"})
    job.wait_for(lambda: "step" in job.stdout())
    names = list(disk.iterdir())
    links = [path for path in Path(f"/proc/{job.process.pid}/fd").iterdir() if str(disk) in str(path.readlink())]
    used = {path.stat().st_ino: path.stat().st_blocks * 512 for path in links}
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    assert names == list(disk.iterdir()) == []
    assert len(used) == 1 and min(used.values()) >= STATES, used
