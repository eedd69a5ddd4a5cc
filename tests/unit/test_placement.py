"""The placement record."""

from hpctrain.plan.mesh import Mesh
from hpctrain.plan.placement import Placement

MESH = Mesh({"data": 2, "tensor": 3})


def test_a_replicated_parameter_is_whole_everywhere() -> None:
    weight = Placement("w", (4, 5), "float32")
    assert weight.count == 20
    assert all(weight.box(MESH, rank) == ((0, 4), (0, 5)) for rank in range(6))
    assert weight.replicated_over(MESH) == ("data", "tensor")
    assert weight.partial_over == ("data",)


def test_a_sharded_dim_is_split_by_the_one_rule() -> None:
    weight = Placement("w", (4, 5), "float32", sharded=((1, "tensor"),))
    assert [weight.box(MESH, rank)[1] for rank in range(6)] == [(0, 2), (2, 4), (4, 5)] * 2
    assert weight.replicated_over(MESH) == ("data",)


def test_boxes_of_two_sharded_dims_tile_the_parameter() -> None:
    weight = Placement("w", (3, 2), "float32", sharded=((0, "data"), (1, "tensor")))
    elements = [
        (i, j)
        for rank in range(6)
        for i in range(*weight.box(MESH, rank)[0])
        for j in range(*weight.box(MESH, rank)[1])
    ]
    assert sorted(elements) == [(i, j) for i in range(3) for j in range(2)]  # rank with tensor 2 owns nothing
    assert weight.replicated_over(MESH) == ()


def test_scalars_have_one_element_and_an_empty_box() -> None:
    scalar = Placement("s", (), "float32")
    assert scalar.count == 1
    assert scalar.box(MESH, 3) == ()


def test_an_axis_that_the_mesh_lacks_shards_nothing() -> None:
    weight = Placement("w", (4,), "float32", sharded=((0, "expert"),))
    assert weight.box(MESH, 5) == ((0, 4),)
