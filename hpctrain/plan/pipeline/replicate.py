"""PipeDream's partitioner: stages that may be replicated, so that early layers run data-parallel and late ones do not.

    VGG on 8 workers: activations shrink, weights lie at the end        7-1: layers 0..k on 7 workers, the rest on 1

Owns the cost model of arXiv 1806.03377, section 3.2, in the paper's form (its published code adds where the paper takes
the larger). Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.partition import Layer

__all__ = ["Replicated", "Stage", "replicate", "slowest_stage", "stage_time"]


@dataclass(frozen=True)
class Stage:
    """Layers start..stop - 1 on `replicas` workers."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class Replicated:
    """The stages, and the time of the slowest stage or message between stages, in seconds a micro-batch."""

    stages: tuple[Stage, ...]
    slowest: float


def stage_time(layers: Sequence[Layer], stage: Stage, bandwidth: float) -> float:
    """max(computation, synchronisation of the weights) / replicas, in seconds a micro-batch.

    m replicas synchronise w bytes by a parameter server in 4 (m - 1) / m w / bandwidth.
    """
    inside, m = layers[stage.start : stage.stop], stage.replicas
    work = sum(layer.forward + layer.backward for layer in inside)
    return max(work, _synchronise(sum(layer.parameter_bytes for layer in inside), m, bandwidth)) / m


def slowest_stage(layers: Sequence[Layer], stages: Sequence[Stage], bandwidth: float) -> float:
    """The time of the slowest stage, or of the slowest message (an activation forward and its gradient back)."""
    messages = (2 * layers[stage.stop - 1].activation_bytes / bandwidth for stage in stages[:-1])
    return max(*(stage_time(layers, stage, bandwidth) for stage in stages), *messages, 0.0)


def replicate(
    layers: Sequence[Layer], num_workers: int, bandwidth: float, max_replicas: int | None = None
) -> Replicated:
    """The stages on exactly `num_workers` workers whose slowest is fastest; the fewest stages among equals.

    Every stage has at least one layer. `max_replicas` 1 gives a straight pipeline. O(layers^2 workers^2).

    Raises:
        ConfigError: no layers or workers, a bandwidth of 0, or so few layers and replicas that a worker is left over.
    """
    most = num_workers if max_replicas is None else max_replicas
    if num_workers < 1 or not bandwidth > 0 or most < 1:
        raise ConfigError(f"workers = {num_workers}, bandwidth = {bandwidth}, replicas = {most}: all must be above 0")
    if num_workers > most * len(layers):
        raise ConfigError(f"{num_workers} workers are more than {len(layers)} layers can use with at most {most} "
                          f"replica{'s' * (most != 1)} each")
    times = list(accumulate((layer.forward + layer.backward for layer in layers), initial=0.0))
    sizes = list(accumulate((layer.parameter_bytes for layer in layers), initial=0))

    def alone(stage: Stage) -> float:
        """`stage_time` from prefix sums."""
        work, size = times[stage.stop] - times[stage.start], sizes[stage.stop] - sizes[stage.start]
        return max(work, _synchronise(size, stage.replicas, bandwidth)) / stage.replicas

    best: dict[tuple[int, int], tuple[float, tuple[Stage, ...]]] = {}  # (layers, workers) -> slowest, stages
    for stop in range(1, len(layers) + 1):
        for workers in range(1, num_workers + 1):
            options: list[tuple[float, tuple[Stage, ...]]] = []
            if workers <= most:
                whole = Stage(0, stop, workers)
                options.append((alone(whole), (whole,)))
            for middle in range(1, stop):
                message = 2 * layers[middle - 1].activation_bytes / bandwidth
                for replicas in range(1, min(most, workers - 1) + 1):
                    if (middle, workers - replicas) in best:
                        before, stages = best[middle, workers - replicas]
                        last = Stage(middle, stop, replicas)
                        options.append((max(before, message, alone(last)), (*stages, last)))
            if options:
                best[stop, workers] = min(options, key=lambda option: (option[0], len(option[1])))
    stages = best[len(layers), num_workers][1]
    return Replicated(stages, slowest_stage(layers, stages, bandwidth))


def _synchronise(num_bytes: int, replicas: int, bandwidth: float) -> float:
    return 4 * (replicas - 1) * num_bytes / replicas / bandwidth
