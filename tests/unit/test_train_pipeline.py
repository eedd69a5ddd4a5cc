"""What [pipeline] means: the plan, the cut, and measured times for the automatic schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.read import config_from, read_config
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.batch import Batch
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.pipeline.partition import Layer
from hpctrain.plan.pipeline.simulate import Times
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.train.pipeline import check_axes, cut, layer_costs, pipelining, with_times

MODEL = {"context": 16, "width": 16, "layers": 3, "heads": 2}


def config(**pipeline):
    return config_from({"model": MODEL, "pipeline": pipeline})


def test_options_reach_the_plan():
    mesh = Mesh({"pipeline": 2, "data": 3})
    found = pipelining(config(schedule="interleaved", chunks=2, group=3), mesh, Batch(1, 6, 3))
    assert found.options == Pipeline("interleaved", 2, 2, {"group": 3, "limit": None})
    assert (found.plan.num_ranks, found.plan.depth, found.plan.num_micro_batches) == (2, 4, 6)
    assert pipelining(config(schedule="interleaved"), Mesh({"data": 3}), Batch(1, 6, 3)) is None


def test_what_cannot_be_trained():
    mesh, batch = Mesh({"pipeline": 2, "data": 1}), Batch(1, 2, 1)
    for wrong, error in [({"pipeline": {"group": 2}}, "takes no group"), ({"zero": {"stage": 3}}, "legal are 0 or 1"),
                         ({"zero": {"stage": 1, "offload": {"states": "disk", "directory": "/d"}}}, "offload")]:
        with pytest.raises((ConfigError, UnsupportedError), match=error):
            pipelining(config_from(wrong), mesh, batch)
    check_axes(Mesh({"pipeline": 2, "data": 2, "tensor": 1}))
    check_axes(Mesh({"data": 1, "pipeline": 2}))
    with pytest.raises(UnsupportedError, match="mesh.tensor = 2 cannot be trained yet.*'pipeline' or 'data'"):
        check_axes(Mesh({"tensor": 2}))
    with pytest.raises(UnsupportedError, match="pipeline first"):
        check_axes(Mesh({"data": 2, "pipeline": 2}))


def test_where_the_model_is_cut():
    sizes = [cost.parameter_bytes for cost in layer_costs(config())]
    block, ends = 4 * (12 * 16 * 16 + 13 * 16), 4 * 256 * 16
    assert sizes == [ends, block, block, block, ends + 4 * 32]
    slow_end = [Layer(forward=t, parameter_bytes=size) for t, size in zip((1, 1, 1, 2, 9), sizes, strict=True)]
    assert cut(config(layers="uniform"), 2, slow_end) == (0, 3, 5)
    assert cut(config(layers="time"), 2, slow_end) == (0, 4, 5)
    assert cut(config(layers="time"), 2, slow_end, measured=False) == cut(config(), 2, slow_end) == (0, 3, 5)
    assert cut(config(layers=[0, 4, 1]), 3, slow_end) == (0, 0, 4, 5)
    for wrong in ([5], [3, 3], [1, 2, 2]):
        with pytest.raises(ConfigError, match="must be 2 numbers, one a stage, that add up to 5"):
            cut(config(layers=wrong), 2, slow_end)


def test_the_automatic_schedule_gets_the_measured_times():
    layers = [Layer(forward=1, backward=4), Layer(forward=2, backward=6), Layer(forward=3, backward=8)]
    found = with_times(Pipeline("zb-auto", 2, options={"limit": 2}), layers, (0, 1, 3))
    assert found.options == {"limit": 2, "times": Times([1, 5], [2, 7], [2, 7])}
    assert found.plan(2, 3).depth == 2
    plain = Pipeline("zb-h1", 2)
    assert with_times(plain, layers, (0, 1, 3)) is plain


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("scripts/*.toml")), ids=lambda path: path.name)
def test_the_configs_that_come_along(path):
    found = read_config(path)
    mesh = found.mesh.mesh(4)
    check_axes(mesh)
    assert (pipelining(found, mesh, Batch(1, 6, 2)) is None) == (mesh.length("pipeline") == 1)
