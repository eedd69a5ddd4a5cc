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
from typing import NamedTuple

import pytest

from tests.jobs.jobs import Finished, python

MIB = 1 << 20
LIMIT = 450 * MIB
STEPPED = 345 * MIB  # of a job with everything on disk, while it trains
LAYERS, WIDTH = 16, 2048
STATES = 2 * 4 * LAYERS * WIDTH**2  # bytes: 512 MiB
SLOWDOWN = 40  # times as long as in memory a step may take, on a slow disk that others use too

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
made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Path("/proc/self/clear_refs").write_text("5")  # from here on the largest resident set is that of the steps
for i in range(steps):
    start = time.perf_counter()
    loss = trainer.step([(random.random((2, WIDTH), dtype=np.float32), np.array([1, 2]))]).loss
    seconds = time.perf_counter() - start
    print("step", loss.hex(), seconds, flush=True)
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print("peak", made * 1024, int(status["VmHWM"].split()[0]) * 1024, flush=True)
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


class Told(NamedTuple):
    """What a job said: losses, seconds of the fastest step after the first, bytes of the largest resident sets."""

    losses: list[str]
    seconds: float
    made: int
    stepped: int


def told(job: Finished) -> Told:
    assert job.code == 0, job.text
    lines = [line.split() for line in job.stdout.splitlines()]
    steps = [line[1:] for line in lines if line[0] == "step"]
    made, stepped = next(line[1:] for line in lines if line[0] == "peak")
    return Told([loss for loss, _ in steps], min(float(seconds) for _, seconds in steps[1:]), int(made), int(stepped))


def test_states_that_exceed_the_memory_train_from_disk(script, tmp_path, group, capsys):
    assert STATES > LIMIT
    program = script(PROGRAM)
    everything = "states,gradients,parameters"
    memory = told(train(program, tmp_path, "-", "-"))
    disk = told(train(program, tmp_path, everything, "-"))
    assert disk.losses == memory.losses, "bit by bit the same"
    assert disk.made < STATES and disk.stepped < STEPPED < LIMIT < memory.stepped
    assert disk.seconds < SLOWDOWN * memory.seconds
    if group != "-":
        killed = train(program, tmp_path, "-", group)
        assert killed.code != 0 and "peak" not in killed.stdout, killed.text
        assert told(train(program, tmp_path, everything, group)).losses == memory.losses
    how = "counted" if group == "-" else "enforced and counted"
    with capsys.disabled():
        print(f"\n{STATES / MIB:.0f} MiB of states in a limit of {LIMIT / MIB:.0f} MiB ({how}): steps of "
              f"{disk.stepped / MIB:.0f} MiB instead of {memory.stepped / MIB:.0f}, {disk.seconds:.2f} s instead of "
              f"{memory.seconds:.2f}, {disk.seconds / memory.seconds:.1f} times as long")


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
