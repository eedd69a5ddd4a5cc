"""Ranks that share cores are named, with the remedy that fits."""

from __future__ import annotations

from hpctrain.runtime.cores import crowding, spans


def test_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spans({3}) == "3" and spans([]) == "none"


def test_cores_of_their_own():
    assert crowding("n1", [0], [[0, 1]]) == ""
    assert crowding("n1", [2, 3], [[0], [1]]) == ""
    assert crowding("n1", [0, 1], [[0, 1], [2, 3]]) == ""


def test_more_ranks_than_cores():
    line = crowding("n2", [4, 5, 6], [[0, 1]] * 3)
    assert line.startswith("ranks 4-6 on n2 share cores 0-1, ")
    assert "fewer ranks" in line and "bind" not in line, "binding does not help"


def test_bound_to_the_same_core():
    line = crowding("n1", [0, 1, 2], [[0], [0], [1, 2, 3]])
    assert line.startswith("ranks 0-1 on n1 share cores ") and "4 cores (0-3) are there for 3 ranks" in line
    assert "mpirun --bind-to core," in line and "srun --cpus-per-task=1 --cpu-bind=cores" in line


def test_not_bound():
    line = crowding("n1", [0, 1], [[0, 1], [0, 1]])
    assert line.startswith("ranks 0-1 on n1 are not bound") and line.endswith("--cpu-bind=cores")
    assert "mpirun --bind-to core," in line
    line = crowding("n1", [0, 1], [[0, 1, 2, 3]] * 2)
    assert "mpirun --bind-to core --map-by slot:PE=CORES_A_RANK" in line, "one core each would be half of them"
