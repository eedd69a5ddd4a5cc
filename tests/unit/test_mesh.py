"""Ranks and coordinates."""

from itertools import permutations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.plan.mesh import Mesh


def test_the_picture() -> None:
    mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
    assert mesh.size == 8
    assert list(mesh.groups("tensor")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups("data")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(mesh.groups("pipeline")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.group(6, "data", "tensor") == (4, 5, 6, 7)
    assert mesh.group(6, "pipeline", "data") == (0, 2, 4, 6)


@pytest.mark.parametrize("axes", list(permutations(["pipeline", "data", "tensor"])))
def test_rank_and_coordinates_are_inverse_in_any_axis_order(axes: tuple[str, ...]) -> None:
    lengths = {"pipeline": 2, "data": 3, "tensor": 4}
    mesh = Mesh({axis: lengths[axis] for axis in axes})
    assert mesh.axes == axes
    seen = set()
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        assert mesh.rank({axis: at[axis] for axis in axes}) == rank
        seen.add(tuple(at[axis] for axis in axes))
        for axis in axes:
            group = mesh.group(rank, axis)
            assert len(group) == lengths[axis]
            assert group[at[axis]] == rank
    assert len(seen) == mesh.size
    assert mesh.coordinates(1)[axes[-1]] == 1  # the last axis runs fastest


def test_groups_partition_the_ranks() -> None:
    mesh = Mesh({"data": 3, "tensor": 2})
    for axes in (("data",), ("tensor",), ("data", "tensor"), ()):
        ranks = [rank for group in mesh.groups(*axes) for rank in group]
        assert sorted(ranks) == list(range(6))


def test_absent_axes_are_one_long() -> None:
    mesh = Mesh({"data": 4})
    assert mesh.length("pipeline") == 1
    assert mesh.coordinates(3) == {"data": 3, "pipeline": 0, "tensor": 0, "context": 0, "expert": 0}
    assert mesh.group(2, "pipeline") == (2,)
    assert Mesh({}).size == 1


def test_many_ranks_cost_nothing() -> None:
    mesh = Mesh({"pipeline": 100, "data": 100, "tensor": 8})
    assert mesh.group(79_999, "tensor") == tuple(range(79_992, 80_000))


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ({"dta": 2}, "did you mean 'data'"),
        ({"data": 0}, r"mesh\.data = 0"),
        ({"data": True}, "data = True"),
        ({"data": 2.0}, r"data = 2\.0"),
    ],
)
def test_illegal_meshes_are_refused(lengths: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Mesh(lengths)


def test_illegal_ranks_and_coordinates_are_refused() -> None:
    mesh = Mesh({"data": 2, "tensor": 2})
    with pytest.raises(ValueError, match="rank = 4"):
        mesh.coordinates(4)
    with pytest.raises(ValueError, match="tensor = 2"):
        mesh.rank({"tensor": 2})
