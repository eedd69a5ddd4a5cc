"""Cuts a chain of layers into stages.

    bounds (0, 3, 5, 5, 8)      stage 0: layers 0 1 2, stage 1: 3 4, stage 2: none, stage 3: 5 6 7

By number of layers, by any weights (parameters, measured times), or as the user says. Owns the record of a layer's cost
and the search for the cut whose slowest stage is fastest. An empty stage is legal: it hands on what it gets; a frozen
layer is one whose backward costs nothing. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpctrain.errors import ConfigError
from hpctrain.plan import split

__all__ = ["Layer", "balanced", "by_parameters", "by_time", "cut_costs", "explicit", "slowest", "uniform"]


@dataclass(frozen=True)
class Layer:
    """What a layer costs for one micro-batch: times in seconds, sizes in bytes.

    Attributes:
        forward: time.
        backward: time of the whole backward; 0 where nothing before it and in it has a gradient.
        activation_bytes: of its output, which the next layer needs.
        parameter_bytes: of its weights.
    """

    forward: float = 0.0
    backward: float = 0.0
    activation_bytes: int = 0
    parameter_bytes: int = 0


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As many layers in each stage, the first ones taking what does not divide; later ones may get none."""
    _check(num_layers, num_stages)
    return split.bounds(num_layers, num_stages)


def explicit(sizes: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The user's list: how many layers each stage has, 0 allowed.

    Raises:
        ConfigError: a negative number, or a sum that is not `num_layers`.
    """
    _check(num_layers, len(sizes))
    if min(sizes) < 0 or sum(sizes) != num_layers:
        raise ConfigError(f"layers of the stages = {list(sizes)}: the numbers must be at least 0 and add up to the "
                          f"{num_layers} layers of the model, not {sum(sizes)}")
    return (0, *accumulate(sizes))


def by_parameters(layers: Sequence[Layer], num_stages: int) -> tuple[int, ...]:
    """Balances the bytes of the parameters."""
    return balanced([layer.parameter_bytes for layer in layers], num_stages)


def by_time(
    layers: Sequence[Layer], num_stages: int, bandwidth: float | None = None, *, overlap: bool = False
) -> tuple[int, ...]:
    """Balances forward plus backward; with `bandwidth` (bytes/s), also what the cuts cost (see `balanced`)."""
    cuts = None if bandwidth is None else cut_costs(layers, bandwidth)
    return balanced([layer.forward + layer.backward for layer in layers], num_stages, cuts, overlap=overlap)


def cut_costs(layers: Sequence[Layer], bandwidth: float) -> list[float]:
    """What a cut before layer i costs: its activation forward, and as much gradient back. Nothing at both ends."""
    if not bandwidth > 0:
        raise ConfigError(f"bandwidth = {bandwidth!r} must be above 0 bytes/s")
    return [0.0, *(2 * layer.activation_bytes / bandwidth for layer in layers[:-1]), 0.0][: len(layers) + 1]


def slowest(
    bounds: Sequence[int], weights: Sequence[float], cuts: Sequence[float] | None = None, *, overlap: bool = False
) -> float:
    """The time of the slowest stage; with `overlap`, of the slowest stage or cut."""
    ends = list(accumulate(weights, initial=0))
    stages = pairwise(bounds)
    return max(_cost(ends, cuts, overlap, start, stop) for start, stop in stages)


def balanced(
    weights: Sequence[float], num_stages: int, cuts: Sequence[float] | None = None, *, overlap: bool = False
) -> tuple[int, ...]:
    """The bounds whose slowest stage is fastest; among those, the most even ones.

    Args:
        weights: of each layer, at least 0.
        num_stages: at least 1; more than layers is legal.
        cuts: what a cut before each layer costs, one more than layers. It is added to the stages on both sides.
        overlap: messages run beside the computation: a cut is a stage of its own, as in PipeDream.

    Raises:
        ConfigError: no stage, a negative weight, or not one more cut than layers.
    """
    _check(len(weights), num_stages)
    if any(not weight >= 0 for weight in (*weights, *(cuts or ()))):
        raise ConfigError("weights and costs of cuts must be at least 0")
    if cuts is not None and len(cuts) != len(weights) + 1:
        raise ConfigError(f"{len(weights)} layers have {len(weights) + 1} places for a cut, not {len(cuts)}")
    ends = list(accumulate(weights, initial=0))
    cost = [[_cost(ends, cuts, overlap, start, stop) if start <= stop else 0.0 for stop in range(len(ends))]
            for start in range(len(ends))]
    best = [cost[0][stop] for stop in range(len(ends))]
    for _ in range(num_stages - 1):
        best = [min(max(best[middle], cost[middle][stop]) for middle in range(stop + 1)) for stop in range(len(ends))]
    return _most_even(cost, num_stages, best[-1])


def _most_even(cost: list[list[float]], num_stages: int, limit: float) -> tuple[int, ...]:
    """The bounds with the smallest squares (of costs, then of layers) among those with no stage above `limit`."""
    places = range(len(cost))
    limit *= 1 + 1e-12  # sums in another order
    infinite = (float("inf"), 0)
    best = [(0.0, 0) if stop == 0 else infinite for stop in places]
    came: list[list[int]] = []
    for _ in range(num_stages):
        row, source = [], []
        for stop in places:
            options = [
                (best[start][0] + cost[start][stop] ** 2, best[start][1] + (stop - start) ** 2, -start)
                for start in range(stop + 1) if cost[start][stop] <= limit
            ]
            squares, layers, start = min(options, default=(*infinite, 0))
            row.append((squares, layers))
            source.append(-start)
        best = row
        came.append(source)
    return tuple(reversed(list(_walk_back(came, len(cost) - 1))))


def _walk_back(came: list[list[int]], stop: int) -> Iterator[int]:
    yield stop
    for source in reversed(came):
        stop = source[stop]
        yield stop


def _cost(ends: Sequence[float], cuts: Sequence[float] | None, overlap: bool, start: int, stop: int) -> float:
    work = ends[stop] - ends[start]
    if cuts is None:
        return work
    return max(work, cuts[start], cuts[stop]) if overlap else work + cuts[start] + cuts[stop]


def _check(num_layers: int, num_stages: int) -> None:
    if num_stages < 1 or num_layers < 0:
        raise ConfigError(f"{num_layers} layers cannot be cut into {num_stages} stages; at least one stage is needed")
