"""The progress thread in real jobs: on by default, silent, gone in time, and off where MPI bears one thread."""

from __future__ import annotations

from tests.jobs.jobs import mpirun

PROGRAM = """
import sys, threading, time
import mpi4py
import numpy as np
options = dict(word.split("=") for word in sys.argv[1:])
mpi4py.rc.thread_level = options.get("level", "multiple")
import hpctrain

context = hpctrain.start(progress=options.get("progress", "on") == "on")
work = context.world.start_all_reduce(np.ones(1 << 20, np.float32))
end = time.monotonic() + (20 if options.get("expect") == "done" else 0.3)
while not work.finished and time.monotonic() < end:
    time.sleep(0.002)
names = [thread.name for thread in threading.enumerate()]
print("done" if work.finished else "not done", "hpctrain progress" in names)
if options.get("leave") != "early":
    assert work.wait()[-1] == context.size
    if options.get("leave") == "close":
        context.close()
        assert "hpctrain progress" not in [thread.name for thread in threading.enumerate()]
else:  # something that nobody answers
    never = context.world.transport.recv(memoryview(bytearray(8)), 0, 5)
    context.world._core.queue.start(iter([never]))
    time.sleep(0.05)
"""


def run(script, tmp_path, *words):
    job = mpirun(2, [script(PROGRAM), *words], tmp_path).finish()
    assert job.code == 0, job.text
    assert job.stderr.count("threads per rank") == 1, job.text
    lines = [line for line in job.stderr.splitlines() if "threads per rank" not in line and "not bound" not in line]
    return sorted(set(job.stdout.splitlines())), lines


def test_a_reduction_ends_while_the_ranks_sleep(script, tmp_path):
    assert run(script, tmp_path, "expect=done", "leave=close") == (["done True"], [])


def test_the_process_ends_with_works_under_way(script, tmp_path):
    assert run(script, tmp_path, "expect=done", "leave=early") == (["done True"], [])


def test_off(script, tmp_path):
    assert run(script, tmp_path, "progress=off") == (["not done False"], [])


def test_an_mpi_for_one_thread_at_a_time(script, tmp_path):
    said, lines = run(script, tmp_path, "level=serialized")
    assert said == ["not done False"]
    assert len(lines) == 1 and "no progress thread, since " in lines[0] and "less than MPI_THREAD_MULTIPLE" in lines[0]
