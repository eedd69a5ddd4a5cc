"""A launcher that promises what MPI does not see; and no launcher, or no MPI, at all."""

from __future__ import annotations

import pytest

from tests.jobs.jobs import python

START = """
import hpctrain
context = hpctrain.start()
print('world', context.size, context.world.exchange(context.rank))
"""


@pytest.mark.parametrize("environ, launcher", [
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, "srun (Slurm)"),
    ({"PMI_SIZE": "4", "PMI_RANK": "2"}, "a PMI launcher"),
])
def test_singletons_are_refused(script, tmp_path, environ, launcher):
    job = python([script(START)], tmp_path, environ=environ).finish()
    assert job.code != 0 and job.stdout == "", job.text
    assert "LaunchError" in job.stderr and launcher in job.stderr
    assert "singleton" in job.stderr and "libmpi" in job.stderr and "--mpi=" in job.stderr


@pytest.mark.parametrize("environ, warnings", [
    ({}, 0),
    ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, 0),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 0),
    ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}, 1),
], ids=["login node", "allocation", "interactive step", "contradiction"])
def test_one_rank_is_fine(script, tmp_path, environ, warnings):
    job = python([script(START)], tmp_path, environ=environ).finish()
    assert job.code == 0 and job.stdout == "world 1 [0]\n", job.text
    assert job.stderr.count("warning:") == warnings, job.text


NO_MPI = "import sys\nsys.modules['mpi4py'] = None\n" + START


def test_without_mpi(script, tmp_path):
    job = python([script(NO_MPI)], tmp_path).finish()
    assert job.code == 0 and job.stdout == "world 1 [0]\n", job.text
    assert job.stderr.count("no MPI here") == 1, job.text


def test_without_mpi_but_with_a_launcher(script, tmp_path):
    job = python([script(NO_MPI)], tmp_path, environ={"PMI_SIZE": "4", "PMI_RANK": "2"}).finish()
    assert job.code != 0 and "MPI cannot be loaded here" in job.stderr, job.text
