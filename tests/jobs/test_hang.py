"""Ranks that wait for each other for ever: the job is over soon, and says who waits where and who is missing.

Each case is one start of a job; limits are a few seconds, and every job is over long before its deadline.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs.jobs import Finished, mpirun

LIMIT = 5  # seconds
LATEST = 12  # seconds from the start of mpirun to its end, the start of Python and MPI included

COLLECTIVES = f"""
import sys, time
import numpy as np
import hpctrain

way, debug = sys.argv[1], "debug" in sys.argv
algorithm = "ring" if "messages" in sys.argv else None
context = hpctrain.start(watch=hpctrain.Watch(limit={LIMIT}, debug=debug))
world = context.world
world.all_reduce(np.ones(101, np.float32))

def second():
    x = np.full(100 if way == "length" and context.rank == 2 else 101, 1.0, np.float32)
    if context.rank == 2 and way == "broadcast":
        return world.broadcast(x, root=2, algorithm=algorithm)
    if context.rank == 2 and way == "sleep":
        time.sleep(300)
    return world.all_reduce(x, name="gradients 1", algorithm=algorithm)

if debug and way != "sleep":
    try:
        second()
    except hpctrain.errors.MismatchError as error:
        print("same error", repr(str(error)), flush=True)
        sys.exit(7)
print("wrong data", second(), flush=True)
"""


def run(script, tmp_path: Path, program: str, num_ranks: int, *arguments: str, **environ: str) -> Finished:
    return mpirun(num_ranks, [script(program), *arguments], tmp_path, environ=environ).finish(seconds=30)


def check_report(job: Finished, tmp_path: Path, num_ranks: int) -> str:
    """The job was ended in time with one report of all ranks, and nothing else was left; gives the report."""
    assert job.code != 0 and job.seconds < LATEST, job.text
    assert job.stderr.count("no progress:") == 1, job.text
    left = sorted(tmp_path.glob("hpctrain-hang-*"))
    assert len(left) == 1 and left[0].suffix == ".txt" and left[0].name in job.stderr, job.text
    report = left[0].read_text()
    for rank in range(num_ranks):
        assert f"\nrank {rank} (" in report and "innermost call last" in report, report
    return report


def test_a_different_length(script, tmp_path):
    job = run(script, tmp_path, COLLECTIVES, 3, "length", "messages")
    check_report(job, tmp_path, 3)
    assert "the ranks differ" in job.stderr and "is not the same on all its ranks" in job.stderr
    assert 'ranks 0-1: all_reduce sum of 101 x float32 "gradients 1"' in job.stderr, job.text
    assert job.stderr.count("all_reduce called at program.py:18 in second") == 2, job.text
    assert 'rank 2: all_reduce sum of 100 x float32 "gradients 1"' in job.stderr, job.text
    assert "wrong data" not in job.stdout


def test_another_collective(script, tmp_path):
    job = run(script, tmp_path, COLLECTIVES, 3, "broadcast", "messages")
    check_report(job, tmp_path, 3)
    assert "ranks 0-1: all_reduce sum of 101 x float32" in job.stderr, job.text
    assert "rank 2: broadcast from 2 of 101 x float32" in job.stderr, job.text
    assert "program.py:15 in second" in job.stderr and "program.py:18 in second" in job.stderr, job.text


@pytest.mark.parametrize("way", ["length", "broadcast"])
def test_ranks_that_meet_learn_it_at_once(script, tmp_path, way):
    job = run(script, tmp_path, COLLECTIVES, 3, way)
    assert job.code != 0 and "wrong data" not in job.stdout, job.text
    other = "all_reduce sum of 100" if way == "length" else "broadcast from 2 of 101"
    assert ('the ranks\' collective calls differ: ranks 0-1: all_reduce sum of 101 x float32 "gradients 1"; '
            f"rank 2: {other} x float32") in job.stderr, job.text
    assert not list(tmp_path.glob("hpctrain-hang-*"))


MESSAGES = f"""
import numpy as np
import hpctrain

context = hpctrain.start(watch=hpctrain.Watch(limit={LIMIT}))
if context.rank == 0:
    context.world.recv(np.empty(7, np.int32), 1)
else:
    context.world.all_reduce(np.ones(3))
"""


def test_a_message_that_nobody_sends(script, tmp_path):
    job = run(script, tmp_path, MESSAGES, 2)
    check_report(job, tmp_path, 2)
    assert ("rank 0: waiting in recv from 1 of 7 x int32, a message in group 'world', Group.recv called at "
            "program.py:7") in job.stderr, job.text
    assert "rank 1: waiting in all_reduce sum of 3 x float64, operation" in job.stderr, job.text
    assert "all_reduce is collective over ranks 0-1" in job.stderr and "recv is collective" not in job.stderr, job.text


@pytest.mark.parametrize("debug", [[], ["debug"]], ids=["normal", "debug"])
def test_a_rank_that_sleeps(script, tmp_path, debug):
    job = run(script, tmp_path, COLLECTIVES, 3, "sleep", *debug)
    report = check_report(job, tmp_path, 3)
    assert f"limit {LIMIT} s" in job.stderr
    assert 'ranks 0-1: waiting in all_reduce sum of 101 x float32 "gradients 1"' in job.stderr, job.text
    assert "rank 2: not in a collective (phase data" in job.stderr, job.text
    assert "its Python stands at program.py:17 in second: time.sleep(300)" in job.stderr, job.text
    assert "in <module>" in report


def test_debug_mode_raises_before_data_moves(script, tmp_path):
    for way, words in (("length", "rank 2: all_reduce sum of 100 x float32"),
                       ("broadcast", "rank 2: broadcast from 2 of 101 x float32")):
        job = run(script, tmp_path, COLLECTIVES, 3, way, "debug")
        assert job.code == 7, job.text
        said = [line for line in job.stdout.splitlines() if line.startswith("same error")]
        assert len(said) == 3 and len(set(said)) == 1, job.text
        assert words in said[0] and "ranks 0-1: all_reduce sum of 101 x float32" in said[0], job.text
        assert re.search(r"operation \d+ of group", said[0]), job.text
        assert "(ranks 0-2)" in said[0] and "called at program.py:18" in said[0], job.text


SAVE = """
import numpy as np
import hpctrain, hpctrain.numpy as face

context = hpctrain.start()
layers = [face.Linear(face.Parameter(np.eye(3)), face.Parameter(np.zeros(3))), face.Tanh()]
trainer = context.trainer(face.network(layers, face.squared_error), optimizer=hpctrain.SGD(lr=0.1))
good = (np.ones((2, 3)), np.ones((2, 3)))
trainer.step([good])
if context.rank == 0:
    trainer.save("checkpoints")
trainer.step([good])
"""


def test_save_on_one_rank(script, tmp_path):
    job = run(script, tmp_path, SAVE, 2, HPCTRAIN_HANG_LIMIT="3")
    check_report(job, tmp_path, 2)
    assert "rank 0: agree, " in job.stderr and "save called at program.py:11" in job.stderr, job.text
    assert "rank 1: all_reduce sum of" in job.stderr and "step called at program.py:12" in job.stderr, job.text
    assert "save is collective over ranks 0-1: all of them must call it" in job.stderr, job.text


ROOT = """
import time
import hpctrain

context = hpctrain.start(watch=hpctrain.Watch(limit=3))

def slow():
    time.sleep(8)
    return 5

def fails():
    raise RuntimeError("no id")

assert context.world.on_root(slow) == 5
try:
    context.world.on_root(fails)
except RuntimeError as error:
    assert str(error) == "rank 0: no id", error
    print("same error", flush=True)
context.close()
"""


def test_work_of_the_root(script, tmp_path):
    job = run(script, tmp_path, ROOT, 3)
    assert job.code == 0, job.text
    assert job.stdout.count("same error") == 3, job.text
    lines = [line for line in job.stderr.splitlines() if "rank 0 is at work alone" in line]
    assert len(lines) == 1 and "wait for its result" in lines[0] and "program.py:14" in lines[0], job.text
    assert "no progress" not in job.stderr
    assert list(tmp_path.glob("*hang*")) == []
