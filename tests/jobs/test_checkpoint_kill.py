"""A job that saves all the time is killed at random moments: the newest acknowledged checkpoint always loads."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Want, find
from hpctrain.collectives import Group
from hpctrain.transport.threads import run_threads
from tests.jobs.jobs import mpirun

NUM_KILLS = 8
COUNT = 600_000  # elements; a save takes some ten milliseconds, so that a kill falls into one
PROGRAM = f"""
import sys
import numpy as np
from mpi4py import MPI
from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Piece, Saver, TensorSpec, find
from hpctrain.collectives import Group
from hpctrain.plan.split import part
from hpctrain.transport.mpi import MpiTransport

group = Group(MpiTransport(MPI.COMM_WORLD), arrays_of)
found = find(sys.argv[1], group, must_exist=False)
step = found.step if found else 0
saver = Saver(sys.argv[1], group, keep=1)
start, stop = part({COUNT}, group.size, group.rank)
tensors = [TensorSpec(name, "float32", ({COUNT},), "param") for name in ("w", "m")]
while True:
    step += 1
    memory = memoryview(np.full(stop - start, step, np.float32)).cast("B")
    saver.save(step, [Piece(tensor, start, stop, memory) for tensor in tensors], user={{"step": step}})
    if group.rank == 0:
        print(f"saved {{step}}.", flush=True)
"""


def load(root: Path) -> tuple[int, list[str]]:
    """The step that loads, after a check of every value, and what was said on the way."""

    def job(transport: object) -> int:
        checkpoint = find(root, Group(transport, arrays_of), must_exist=True)  # type: ignore[arg-type]
        for name in ("w", "m"):
            values = np.zeros(COUNT, np.float32)
            checkpoint.read([Want(name, 0, COUNT, memoryview(values).cast("B"))])
            assert (values == checkpoint.step).all()
        assert checkpoint.user == {"step": checkpoint.step}
        return checkpoint.step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step: int = run_threads(1, job)[0]
    return step, [str(warning.message) for warning in caught]


def acknowledged(text: str) -> int:
    """The last step that the job said was saved."""
    return max((int(step) for step in re.findall(r"saved (\d+)\.", text)), default=0)


def test_whatever_moment_it_is_killed_the_newest_whole_checkpoint_loads(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    rng = random.Random(7)
    root, program = tmp_path / "root", script(PROGRAM)
    reached = leftovers = 0
    for number in range(NUM_KILLS):
        job = mpirun(2, [program, str(root)], tmp_path)
        job.wait_for(lambda job=job, reached=reached: acknowledged(job.stdout()) > reached)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.3))
        if number % 2:
            job.ranks()[rng.randrange(2)].kill()  # one rank dies, the launcher ends the other
        else:
            job.kill_all()
        finished = job.finish()
        assert finished.code != 0
        leftovers += any(path.name.startswith(".tmp-") for path in root.iterdir())
        step, heard = load(root)
        assert step >= acknowledged(finished.stdout) > reached, finished.text
        assert heard == []  # a kill is not a crash of the machine: nothing half-written has a checkpoint's name
        reached = step
    assert leftovers > 0, "no kill fell into a save: the test shows nothing"
