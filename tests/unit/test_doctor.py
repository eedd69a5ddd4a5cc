"""The doctor's table and warnings, from plain data."""

from __future__ import annotations

from hpctrain.cli.doctor import core_warnings, mpirun_warning, rows, spans


def test_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spans([]) == "none"


def test_equal_facts_once_and_different_ones_with_their_ranks():
    everybody = [{"a": "x", "b": b, "_hidden": hidden} for b, hidden in (("1", 7), ("2", 8), ("1", 9))]
    assert rows(everybody) == [("a", "x", "all"), ("b", "1", "0,2"), ("b", "2", "1")]


def test_core_warnings():
    assert core_warnings([("n1", [0]), ("n1", [1]), ("n2", [0])]) == []
    assert core_warnings([("n1", [0, 1]), ("n1", [0, 1])]) == []
    (line,) = core_warnings([("n1", [0, 1]), ("n2", [0]), ("n2", [0])])
    assert line.startswith("ranks 1-2 on n2 share cores 0 ") and "--bind-to core" in line
    (line,) = core_warnings([("n1", [0, 1])] * 4)
    assert line.startswith("ranks 0-3 on n1")


def test_mpirun_warning():
    assert mpirun_warning(("/usr/bin/mpirun", "Open MPI"), "Open MPI") == []
    assert mpirun_warning(("", ""), "Open MPI") == []
    (line,) = mpirun_warning(("/usr/bin/mpirun", "MPICH"), "Open MPI")
    assert "/usr/bin/mpirun of MPICH" in line and "Call the mpirun of Open MPI" in line
