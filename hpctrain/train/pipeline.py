"""The pipeline that a config asks for: its options, its proved plan, and where the model is cut.

Owns the meaning of [pipeline] and of mesh.pipeline, for `hpctrain train` and `hpctrain plan` alike. Must not know how
stages are made or run. Loads no array library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from hpctrain.config.records import Config
from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError, UnsupportedError, choices
from hpctrain.plan.batch import Batch
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.pipeline.partition import Layer, by_parameters, by_time, explicit, uniform
from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.proof import Proof, prove
from hpctrain.plan.pipeline.simulate import Times
from hpctrain.runtime.pipeline_options import Pipeline, check_zero
from hpctrain.train.recipe import make_shape, make_zero

__all__ = ["Pipelining", "check_axes", "cut", "layer_costs", "pipelining", "with_times"]


@dataclass(frozen=True)
class Pipelining:
    """A pipeline that fits the job: what the runtime takes, and the plan of a whole step with its proof."""

    options: Pipeline
    plan: PipelinePlan
    proof: Proof


def check_axes(mesh: Mesh, trainable: Sequence[str] = ("pipeline", "data")) -> None:
    """Refuses meshes that this release can plan but not run."""
    for axis, length in mesh.lengths:
        if axis not in trainable and length > 1:
            raise UnsupportedError(f"mesh.{axis} = {length} cannot be trained yet; legal is 1 (training uses the axes "
                                   f"{choices(trainable)})")
    used = [axis for axis, length in mesh.lengths if length > 1 and axis in trainable]
    if used == ["data", "pipeline"]:
        raise UnsupportedError("[mesh] has data before pipeline; legal is pipeline first: the ranks of one stage are "
                               "neighbours, because they reduce gradients")


def pipelining(config: Config, mesh: Mesh, batch: Batch) -> Pipelining | None:
    """The pipeline of a job on `mesh`; None where it has no pipeline axis. Local.

    Raises:
        ConfigError, UnsupportedError: options that do not go together with each other or with the mesh.
        PlanError: the schedule cannot be run.
    """
    ranks, p = mesh.length("pipeline"), config.pipeline
    if ranks == 1:
        return None
    check_zero(make_zero(config))
    options = Pipeline(p.schedule, ranks, p.chunks, {"group": p.group, "limit": p.limit})
    plan = options.plan(ranks, batch.accumulation)
    return Pipelining(options, plan, prove(plan))


def cut(config: Config, num_stages: int, layers: Sequence[Layer], *, measured: bool = True) -> tuple[int, ...]:
    """The bounds of the stages, by pipeline.layers. Where that is "time" and `layers` have none, by parameters.

    Raises:
        ConfigError: a list that does not fit the stages or the layers.
    """
    how = config.pipeline.layers
    if isinstance(how, str):
        if how == "uniform":
            return uniform(len(layers), num_stages)
        return (by_time if how == "time" and measured else by_parameters)(layers, num_stages)
    if len(how) != num_stages or sum(how) != len(layers):
        raise ConfigError(f"pipeline.layers = {list(how)} must be {num_stages} numbers, one a stage, that add up to "
                          f"{len(layers)}, the layers of the model: {', '.join(make_shape(config).steps())}")
    return explicit(how, len(layers))


def layer_costs(config: Config) -> list[Layer]:
    """Bytes of parameters and of stashed activations of each layer of the model, for one micro-batch of one sample."""
    shape, size = make_shape(config), dtype_of(config.run.dtype).num_bytes
    sizes: Mapping[str, tuple[int, ...]] = shape.parameters()
    return [Layer(activation_bytes=size * kept, parameter_bytes=size * sum(prod(sizes[name]) for name in names))
            for names, kept in zip(shape.steps().values(), shape.step_activations(1, config.length), strict=True)]


def with_times(options: Pipeline, layers: Sequence[Layer], bounds: Sequence[int]) -> Pipeline:
    """The automatic schedule for measured times of its stages, both parts of a backward alike; others as they are."""
    if options.schedule != "zb-auto":
        return options
    stages = [layers[start:stop] for start, stop in pairwise(bounds)]
    forward = [sum(layer.forward for layer in stage) for stage in stages]
    half = [sum(layer.backward for layer in stage) / 2 for stage in stages]
    more: dict[str, Any] = {"times": Times(forward, half, half)}
    return replace(options, options={**options.options, **more})
