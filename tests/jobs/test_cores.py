"""Ranks that share cores hear so once, by rank 0; ranks that are bound hear nothing."""

from __future__ import annotations

import os

import pytest

from tests.jobs.jobs import mpirun

PROGRAM = """
import os, sys
sets = eval(sys.argv[1])
cores = sorted(os.sched_getaffinity(0))
from mpi4py import MPI
os.sched_setaffinity(0, [cores[i] for i in sets[MPI.COMM_WORLD.rank]])
import hpctrain
hpctrain.start()
world = hpctrain.start().world
part = world.subgroup(range(world.size))
print("sleeps" if part._core.queue.shares_core else "awake", flush=True)  # while it waits for a message
"""
SHARING = (" are not bound", " share cores ")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("sets, sleeping, words", [
    ([[0], [1]], 0, []),
    ([[0, 1], [0, 1]], 0, ["ranks 0-1 on", "are not bound", "--bind-to core"]),
    ([[0], [0, 1]], 1, ["ranks 0-1 on", "share cores", "--bind-to core"]),
    ([[0, 1]] * 3, 3, ["ranks 0-2 on", "share cores", "start fewer ranks"]),
], ids=["bound", "not bound", "bound to one", "too many"])
def test_said_once(script, tmp_path, sets, sleeping, words):
    job = mpirun(len(sets), [script(PROGRAM), repr(sets)], tmp_path).finish()
    assert job.code == 0, job.text
    lines = [line for line in job.stderr.splitlines() if any(words in line for words in SHARING)]
    assert len(lines) == bool(words), job.text
    assert all(word in lines[0] for word in words), job.text
    assert job.stdout.split().count("sleeps") == sleeping, job.text
