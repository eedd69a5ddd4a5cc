"""The doctor's table and warnings, from plain data."""

from __future__ import annotations

from hpctrain.cli.doctor import mpirun_warning, rows


def test_equal_facts_once_and_different_ones_with_their_ranks():
    everybody = [{"a": "x", "b": b} for b in "121"]
    assert rows(everybody) == [("a", "x", "all"), ("b", "1", "0,2"), ("b", "2", "1")]


def test_mpirun_warning():
    assert mpirun_warning(("/usr/bin/mpirun", "Open MPI"), "Open MPI") == []
    assert mpirun_warning(("", ""), "Open MPI") == []
    (line,) = mpirun_warning(("/usr/bin/mpirun", "MPICH"), "Open MPI")
    assert "/usr/bin/mpirun of MPICH" in line and "Call the mpirun of Open MPI" in line
