"""The batch equation: case 19 of the case bank, with a data axis of 2 in a world of 4 (tensor 2)."""

import pytest

from hpctrain.errors import ConfigError
from hpctrain.plan.batch import solve_batch
from hpctrain.plan.mesh import Mesh

DATA = Mesh({"data": 2, "tensor": 2}).length("data")


@pytest.mark.parametrize("given, expected", [
    ({"micro": 2, "accumulation": 3}, (12, 2, 3)),
    ({"size": 12, "micro": 2}, (12, 2, 3)),
    ({"size": 12, "accumulation": 3}, (12, 2, 3)),
    ({"micro": 2}, (4, 2, 1)),
    ({"size": 12}, (12, 6, 1)),
    ({"size": 12, "micro": 2, "accumulation": 3}, (12, 2, 3)),
])
def test_given_sizes_give_the_others_with_the_data_axis_not_the_world(given, expected):
    batch = solve_batch(DATA, **given)
    assert (batch.size, batch.micro, batch.accumulation) == expected
    assert batch.data == 2


@pytest.mark.parametrize("given, words", [
    ({"size": 10, "micro": 2}, ["10 != 2 x accumulation x 2", "8 or 12"]),
    ({"size": 3, "micro": 2}, ["3 != 2 x accumulation x 2", "batch.global = 4"]),
    ({"size": 10, "accumulation": 3}, ["10 != micro x 3 x 2", "6 or 12"]),
    ({"size": 7}, ["7 != micro x 1 x 2", "6 or 8"]),
    ({"size": 16, "micro": 2, "accumulation": 3}, ["16 != 2 x 3 x 2 = 12", "batch.global = 12", "accumulation = 4"]),
    ({"size": 18, "micro": 2, "accumulation": 3}, ["18 != 2 x 3 x 2 = 12", "batch.micro = 3"]),
    ({"accumulation": 3}, ["give batch.micro or batch.global"]),
    ({}, ["give batch.micro or batch.global"]),
    ({"micro": 2, "accumulation": 0}, ["batch.accumulation = 0", "at least 1"]),
    ({"size": 0}, ["batch.global = 0"]),
    ({"micro": True}, ["batch.micro = True"]),
])
def test_what_does_not_fit_is_refused_with_the_equation_filled_in(given, words):
    with pytest.raises(ConfigError) as caught:
        solve_batch(DATA, **given)
    for word in words:
        assert word in str(caught.value)


def test_derived_sizes_are_named():
    assert solve_batch(2, size=12, micro=2).derived == ("accumulation",)
    assert str(solve_batch(2, size=12, micro=2)) == "12 = 2 x 3 x 2"
