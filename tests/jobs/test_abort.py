"""One rank fails in some way, the others wait: the whole job is over within seconds, and says why first."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.jobs.jobs import mpirun, python

PROGRAM = """
import os, sys, threading, time
import hpctrain

way = sys.argv[1]
if way == "import before MPI" and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    import a_module_that_is_not_there
if way == "import":
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 0:
        import a_module_that_is_not_there
context = hpctrain.start()
last = context.rank == context.size - 1
if way == "step":
    import numpy as np
    import hpctrain.numpy as face

    class Refuses:
        def __getitem__(self, index):
            raise ValueError("boom")

    layers = [face.Linear(face.Parameter(np.eye(3)), face.Parameter(np.zeros(3))), face.Tanh()]
    trainer = context.trainer(face.network(layers, face.squared_error), optimizer=hpctrain.SGD(lr=0.1))
    good = (np.ones((2, 3)), np.ones((2, 3)))
    print(trainer.step([good, good, good]).loss, flush=True)
    trainer.step([good, good, Refuses() if last else good])
if context.rank == 0:
    if way == "raise":
        raise ValueError("boom")
    if way == "exit":
        sys.exit(3)
    if way == "raise with a live thread":
        threading.Thread(target=time.sleep, args=(300,)).start()
        raise ValueError("boom")
    if way == "in a thread":
        def work():
            raise ValueError("boom")
        threading.Thread(target=work).start()
        time.sleep(300)
    if way == "interrupt":
        raise KeyboardInterrupt
if way == "exit together":
    try:
        sys.exit(9)  # caught: means nothing
    except SystemExit:
        sys.exit(75)
if way == "leave":
    if context.rank == 0:
        raise SystemExit(3)
    time.sleep(7)
    sys.exit(0)
context.world.barrier()
"""


@pytest.mark.parametrize("num_ranks, way, code, text", [
    (3, "step", 1, "ValueError: boom"),
    (2, "raise", 1, "ValueError: boom"),
    (4, "raise", 1, "ValueError: boom"),
    (2, "exit", 3, "left with exit code 3"),
    (2, "raise with a live thread", 1, "ValueError: boom"),
    (2, "in a thread", 1, "ValueError: boom"),
    (2, "import", 1, "No module named 'a_module_that_is_not_there'"),
    (2, "import before MPI", 1, "No module named 'a_module_that_is_not_there'"),
    (2, "interrupt", 130, "KeyboardInterrupt"),
])
def test_the_job_ends(script, tmp_path, num_ranks, way, code, text):
    job = mpirun(num_ranks, [script(PROGRAM), way], tmp_path).finish(seconds=20)
    assert job.code == code, job.text
    assert job.seconds < 10, job.text
    lines = [line for line in job.stderr.splitlines() if line.strip() and not line.startswith("hpctrain: ranks")]
    failing = f"[rank {num_ranks - 1 if way == 'step' else 0}/{num_ranks} {socket.gethostname()}]"
    assert lines[0].startswith(failing), job.text
    assert any(line.startswith(failing) and text in line for line in lines), job.text


def test_behind_a_shell(script, tmp_path):
    command = ["sh", "-c", 'python="$0"; "$python" "$@"; code=$?; exit $code']
    job = mpirun(2, [sys.executable, script(PROGRAM), "raise"], tmp_path, command=command).finish(seconds=20)
    assert job.code != 0 and job.seconds < 10, job.text
    assert "ValueError: boom" in job.stderr


def test_ranks_that_leave_together_are_not_aborted(script, tmp_path):
    job = mpirun(2, [script(PROGRAM), "exit together"], tmp_path).finish(seconds=20)
    assert job.code == 75, job.text
    assert "MPI_ABORT" not in job.text and "ending the job" not in job.text


def test_a_rank_that_left_alone_says_so(script, tmp_path):
    job = mpirun(2, [script(PROGRAM), "leave"], tmp_path).finish(seconds=30)
    assert job.code == 3, job.text
    assert "[rank 0/2" in job.stderr and "has ended and waits for other ranks" in job.stderr


def test_switched_off(script, tmp_path):
    program = script("import hpctrain, sys, threading; print(sys.excepthook is sys.__excepthook__)")
    assert python([program], tmp_path, environ={"HPCTRAIN_EXCEPTION_HOOK": "0"}).finish().stdout == "True\n"
    assert python([program], tmp_path).finish().stdout == "False\n"


def test_one_rank_is_ordinary_python(script, tmp_path):
    job = python([script("import hpctrain, sys\nhpctrain.start()\nraise ValueError('boom')")], tmp_path).finish()
    assert job.code == 1 and "[rank" not in job.stderr and "ValueError: boom" in job.stderr
    job = python([script("import hpctrain, sys\nhpctrain.start()\nsys.exit('words')")], tmp_path).finish()
    assert job.code == 1 and job.stderr.endswith("words\n")
