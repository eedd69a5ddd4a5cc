"""MPI's world against the launcher's promise."""

from __future__ import annotations

import pytest

from hpctrain import env
from hpctrain.errors import LaunchError
from hpctrain.runtime.launch import MpiLibrary, check

OPEN_MPI = MpiLibrary("Open MPI", "5.0.11", "/lib/libmpi.so.40")
MPICH = MpiLibrary("MPICH", "5.0.2", "/lib/libmpi.so.12")
SRUN = env.launch({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"})
PMI = env.launch({"PMI_SIZE": "4", "PMI_RANK": "2"})
MPIRUN = env.launch({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"})


@pytest.mark.parametrize("launch, library, advice", [
    (SRUN, OPEN_MPI, "srun --mpi=pmix"),
    (SRUN, MPICH, "srun --mpi=pmi2"),
    (PMI, OPEN_MPI, "the mpirun that belongs to this library (Open MPI)"),
    (MPIRUN, MPICH, "the mpirun that belongs to this library (MPICH)"),
])
def test_singleton_is_refused_with_advice(launch, library, advice):
    with pytest.raises(LaunchError) as caught:
        check(1, launch, library, [])
    text = str(caught.value)
    assert launch.launcher in text and launch.evidence in text
    assert "singleton" in text and str(library) in text and advice in text


def test_nothing_to_say():
    assert check(1, None, OPEN_MPI, []) == []
    assert check(4, SRUN, OPEN_MPI, ["odd"]) == []
    assert check(1, env.launch({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}), OPEN_MPI, []) == []


def test_warnings():
    (line,) = check(3, SRUN, OPEN_MPI, [])
    assert "promised 4" in line and "sees 3" in line
    assert check(1, None, OPEN_MPI, ["odd"]) == ["odd"]
