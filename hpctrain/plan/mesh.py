"""The mesh: the ranks of a job as a grid of named axes.

    Mesh({"pipeline": 2, "data": 2, "tensor": 2}): the last axis runs fastest

         pipeline 0                pipeline 1
         data 0: ranks 0 1         data 0: ranks 4 5        <- a row is one tensor group
         data 1: ranks 2 3         data 1: ranks 6 7           a column one data group

The order of the axes is the user's: the last one gets neighbouring ranks, thus usually one node. Pure, standard
library only; the same object serves 8 or 80,000 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["AXES", "Mesh"]

#: The axis names that the engines know.
AXES = ("pipeline", "data", "tensor", "context", "expert")


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their lengths, slowest first."""

    lengths: tuple[tuple[str, int], ...]

    def __init__(self, lengths: Mapping[str, int]) -> None:
        for axis, length in lengths.items():
            if axis not in AXES:
                raise ConfigError(f"mesh axis {axis!r} is unknown{nearest(axis, AXES)}; legal are {choices(AXES)}")
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise ConfigError(f"mesh.{axis} = {length!r} must be an integer of at least 1")
        object.__setattr__(self, "lengths", tuple(lengths.items()))

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names, slowest first."""
        return tuple(axis for axis, _ in self.lengths)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(length for _, length in self.lengths)

    def length(self, axis: str) -> int:
        """Ranks along `axis`; an axis that the mesh does not have is 1 long."""
        return dict(self.lengths).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands: {axis: index}."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank = {rank} must be in 0..{self.size - 1}")
        result = {}
        for axis, length in reversed(self.lengths):
            rank, result[axis] = divmod(rank, length)
        return {axis: result[axis] for axis in self.axes} | {a: 0 for a in AXES if a not in result}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; axes left out count as 0."""
        result = 0
        for axis in coordinates:
            if not 0 <= coordinates[axis] < self.length(axis):
                raise ValueError(f"{axis} = {coordinates[axis]} must be in 0..{self.length(axis) - 1}")
        for axis, length in self.lengths:
            result = result * length + coordinates.get(axis, 0)
        return result

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share `rank`'s place on every axis but `axes`, in order along them: its group over `axes`."""
        here = self.coordinates(rank)
        spans: list[dict[str, int]] = [dict(here)]
        for axis in axes:
            spans = [{**at, axis: i} for at in spans for i in range(self.length(axis))]
        return tuple(self.rank(at) for at in spans)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Every group over `axes` once, by its lowest rank."""
        for rank in range(self.size):
            group = self.group(rank, *axes)
            if group[0] == rank:
                yield group
