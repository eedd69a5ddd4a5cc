"""One rank is killed in the middle of a collective: the job is over within seconds, and nothing of it is left.

Each case is one job that does the same calls again and again; the others may be anywhere in them when it happens.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.jobs.jobs import mpirun

SHARED = Path("/dev/shm")
LATEST = 10.0  # seconds from the kill to the end of the last process

PROGRAM = """
import sys
import numpy as np
import hpctrain

context = hpctrain.start()
world, size, rank = context.world, context.size, context.rank


def allocated(num_bytes):
    memory = world.transport.allocate(num_bytes)
    return np.frombuffer(memory, np.float32)


def buffers(num_bytes):
    return [allocated(num_bytes), allocated(num_bytes), allocated(num_bytes // size)]


def ring(whole, other):
    right = world.start_send(whole, (rank + 1) % size)
    world.recv(other, (rank - 1) % size)
    right.wait()


def both(whole, other, root):
    works = [world.start_all_reduce(whole), world.start_broadcast(other, root)]
    for work in works:
        work.wait()


def agreed():
    with world.agree():
        world.exchange(rank)


CALLS = {
    "broadcast": lambda w, o, p, root: world.broadcast(w, root),
    "scatter": lambda w, o, p, root: world.scatter(p, w, root),
    "gather": lambda w, o, p, root: world.gather(p, root, counts=[len(p)] * size, out=w if rank == root else None),
    "reduce": lambda w, o, p, root: world.reduce(w, root=root),
    "all_reduce": lambda w, o, p, root: world.all_reduce(w),
    "reduce_scatter": lambda w, o, p, root: world.reduce_scatter(w, out=p),
    "all_gather": lambda w, o, p, root: world.all_gather(p, counts=[len(p)] * size, out=w),
    "all_to_all": lambda w, o, p, root: world.all_to_all(w, out=o),
    "barrier": lambda w, o, p, root: world.barrier(),
    "send and recv": lambda w, o, p, root: ring(w, o),
    "agree": lambda w, o, p, root: agreed(),
    "works": lambda w, o, p, root: both(w, o, root),
}
call = CALLS[sys.argv[1]]
sizes = [buffers(4 * 3 * 1024), buffers(4 * 3 * 87_382)]  # 12 KiB and 1 MiB, equal parts for three ranks
step = 0
while True:
    call(*sizes[step % 2], step % size)
    step += 1
    if step == 20:
        print("under way", flush=True)
"""
CALLS = ("broadcast", "scatter", "gather", "reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
         "barrier", "send and recv", "agree", "works")


def segments() -> set[str]:
    return {path.name for path in SHARED.glob("hpctrain*")} if SHARED.is_dir() else set()


@pytest.mark.parametrize("call", CALLS)
def test_the_job_ends_and_leaves_nothing(script, tmp_path, call):
    before = segments()
    job = mpirun(3, [script(PROGRAM), call], tmp_path)
    job.wait_for(lambda: job.stdout().count("under way") == 3, seconds=20)
    victim = job.ranks()[CALLS.index(call) % 3]
    victim.send_signal(signal.SIGKILL)
    done = job.finish(seconds=LATEST)  # that no process is left is checked there
    assert done.code != 0, done.text
    give_up = time.monotonic() + 5.0  # other jobs of this machine may be creating theirs
    while segments() - before and time.monotonic() < give_up:
        time.sleep(0.1)
    assert segments() <= before, done.text
