"""The doctor on real jobs: one table, however many ranks; a wrong launch is described instead of refused."""

from __future__ import annotations

from tests.jobs.jobs import mpirun, python


def test_one_table_for_all_ranks(tmp_path):
    job = mpirun(2, ["-m", "hpctrain", "doctor"], tmp_path).finish()
    assert job.code == 0, job.text
    assert job.stdout.count("mpirun on PATH") == 1
    assert "2 ranks" in job.stdout and "OMPI_COMM_WORLD_SIZE=2" in job.stdout and "allowed cores" in job.stdout


def test_a_wrong_launch_is_described_once(tmp_path):
    for rank, tables in (("0", 1), ("1", 0)):
        environ = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank}
        job = python(["-m", "hpctrain", "doctor"], tmp_path, environ=environ).finish()
        assert job.code == 0, job.text
        assert job.stdout.count("allowed cores") == job.stdout.count("singleton") == tables, job.text
