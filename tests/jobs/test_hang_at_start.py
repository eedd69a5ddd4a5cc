"""One rank never comes to `start`: the others do not wait in silence, and the job ends."""

from __future__ import annotations

from tests.jobs.jobs import mpirun

PROGRAM = """
import os, sys, time
import hpctrain

if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    if sys.argv[1] == "in MPI":
        from mpi4py import MPI
    time.sleep(300)
context = hpctrain.start(watch=hpctrain.Watch(phases={"init": 3}))
print("started", flush=True)
"""


def test_a_rank_that_never_reaches_mpi(script, tmp_path):
    job = mpirun(2, [script(PROGRAM), "before MPI"], tmp_path).finish(seconds=20)
    assert job.code != 0 and job.seconds < 12 and "started" not in job.stdout, job.text
    assert "in mpi_waits_for_all_ranks_to_start" in job.stderr and "program.py" in job.stderr, job.text


def test_a_rank_that_never_reaches_start(script, tmp_path):
    job = mpirun(2, [script(PROGRAM), "in MPI"], tmp_path).finish(seconds=20)
    assert job.code != 0 and job.seconds < 12 and "started" not in job.stdout, job.text
    assert "no progress: rank 0 has been in hpctrain.start for" in job.stderr and "the job is ended" in job.stderr
    assert "Do all ranks run" in job.stderr and "program.py" in job.stderr, job.text
