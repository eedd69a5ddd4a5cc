"""What launchers promise, read from faked environments."""

from __future__ import annotations

import pytest

from hpctrain import env
from hpctrain.errors import ConfigError

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
        "SLURM_LOCALID": "1"}
INTERACTIVE = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}

PROMISES = {
    "open mpi": (OMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (4, 3, 0)),
    "mpich": ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "1"}, (4, 2, 1)),
    "mpich, bare": ({"PMI_SIZE": "4", "PMI_RANK": "2"}, (4, 2, None)),
    "pals": ({"PALS_SIZE": "8", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "3"}, (8, 3, 3)),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "0"}, (2, 1, 0)),
    "lsf": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_LOCAL_RANK": "2"}, (6, 5, 2)),
    "srun": (SRUN, (4, 2, 1)),
    "srun, a smaller step": (SRUN | {"SLURM_NTASKS": "8"}, (4, 2, 1)),
    "srun, told by its rank only": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, (4, 2, None)),
    # mpirun starts its helpers by srun: what it says itself counts
    "open mpi in slurm": (SRUN | OMPI | {"SLURM_STEP_NUM_TASKS": "1"}, (4, 3, None)),
    "hydra in slurm": (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4", "PMI_RANK": "3"}, (4, 3, 1)),
}


@pytest.mark.parametrize("environ, expected", PROMISES.values(), ids=PROMISES)
def test_promise(environ, expected):
    launch = env.launch(environ)
    assert launch is not None
    assert (launch.size, launch.rank, launch.local_rank) == expected


NO_PROMISE = {
    "nothing": {},
    "login node with odd leftovers": {"SLURM_CONF": "x", "PMI_FD": "7"},
    "salloc shell": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "interactive step": INTERACTIVE,
    "unreadable": {"OMPI_COMM_WORLD_SIZE": "four", "OMPI_COMM_WORLD_RANK": "0"},
}


@pytest.mark.parametrize("environ", NO_PROMISE.values(), ids=NO_PROMISE)
def test_no_promise(environ):
    assert env.launch(environ) is None


def test_oddities():
    assert env.oddities({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}) == []
    assert env.oddities({"SLURM_NTASKS": "2"}) == []
    (line,) = env.oddities({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"})
    assert "SLURM_NTASKS_PER_NODE=2" in line and "--ntasks=2" in line


@pytest.mark.parametrize("environ, expected", [
    ({}, None),
    ({"OMP_NUM_THREADS": "3"}, ("OMP_NUM_THREADS", 3)),
    ({"OMP_NUM_THREADS": "4,2"}, ("OMP_NUM_THREADS", 4)),
    ({"OMP_NUM_THREADS": "0"}, None),
    ({"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "2"}, ("MKL_NUM_THREADS", 2)),
])
def test_user_threads(environ, expected):
    assert env.user_threads(environ) == expected


def test_home_is_completed_only_where_missing():
    environ = {"HOME": "there"}
    env.complete_home(environ)
    assert environ == {"HOME": "there"}
    environ = {}
    env.complete_home(environ)
    assert environ["HOME"] != ""


@pytest.mark.parametrize("text, expected", [("0", False), ("off", False), ("1", True), ("", True)])
def test_exception_hook(text, expected):
    assert env.exception_hook({"HPCTRAIN_EXCEPTION_HOOK": text}) is expected
    assert env.exception_hook({}) is True


@pytest.mark.parametrize("text, expected", [(None, None), ("", None), ("1", True), ("yes", True), ("0", False),
                                            (" off ", False)])
def test_debug(text, expected):
    assert env.debug({} if text is None else {"HPCTRAIN_DEBUG": text}) is expected


def test_hang_limit():
    assert env.hang_limit({}) is None
    assert env.hang_limit({"HPCTRAIN_HANG_LIMIT": " 2.5 "}) == 2.5
    for bad in ("0", "-1", "soon", "nan"):
        with pytest.raises(ConfigError, match="HPCTRAIN_HANG_LIMIT"):
            env.hang_limit({"HPCTRAIN_HANG_LIMIT": bad})
