"""Cores and threads of a real job: the allowed set stays as it is, and ranks share it."""

from __future__ import annotations

import json
import os

from tests.jobs.jobs import mpirun

PROGRAM = """
import json, os
import hpctrain

cores = [sorted(os.sched_getaffinity(0))]
context = hpctrain.start()
cores.append(sorted(os.sched_getaffinity(0)))
import numpy, torch, h5py
cores.append(sorted(os.sched_getaffinity(0)))
context.world.all_reduce(torch.ones(8))
cores.append(sorted(os.sched_getaffinity(0)))
seen = context.world.exchange([cores, context.threads, torch.get_num_threads(), context.local_rank, context.local_size])
if context.rank == 0:
    print(json.dumps(seen))
"""


def run(script, tmp_path, environ):
    job = mpirun(2, [script(PROGRAM)], tmp_path, environ=environ).finish()
    assert job.code == 0, job.text
    assert job.stderr.count("threads per rank") == 1, job.text
    return json.loads(job.stdout)


def test_share(script, tmp_path):
    allowed = len(os.sched_getaffinity(0))
    for rank, (cores, threads, torch_threads, local_rank, local_size) in enumerate(run(script, tmp_path, {})):
        assert all(now == cores[0] for now in cores)
        assert threads == torch_threads == max(1, allowed // 2)
        assert (local_rank, local_size) == (rank, 2)


def test_the_users_choice_wins(script, tmp_path):
    for _, threads, torch_threads, _, _ in run(script, tmp_path, {"OMP_NUM_THREADS": "2"}):
        assert threads == torch_threads == 2
