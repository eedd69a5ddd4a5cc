"""The placement record: everything the engines need to know about one parameter, as data.

Reduction, gradient norm, overflow test, initialisation, checkpoint, export and the memory report all read this record;
none keeps a flag of its own. Pure, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hpctrain.plan.mesh import Mesh
from hpctrain.plan.split import part

__all__ = ["Box", "Placement"]

Box = tuple[tuple[int, int], ...]  # a half-open interval [start, stop) for each dim; () for a scalar


@dataclass(frozen=True)
class Placement:
    """One logical parameter.

    `shape` is the global shape. `sharded` maps a dim to the mesh axis that it is split over (by `plan.split`); over
    every other axis the parameter is replicated. `partial_over` names the axes over which each rank holds only a part
    of the gradient's sum (the data axis in data parallelism); over the others the gradient is complete as it is.
    `aliases` are further names of the same (tied) parameter: one storage, one gradient, saved once.
    `decay` says whether weight decay is meant for it (matrices, not biases and norms).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharded: tuple[tuple[int, str], ...] = ()
    partial_over: tuple[str, ...] = ("data",)
    aliases: tuple[str, ...] = ()
    decay: bool = True
    frozen: bool = False

    @property
    def count(self) -> int:
        """Number of elements of the logical parameter."""
        return prod(self.shape)

    def box(self, mesh: Mesh, rank: int) -> Box:
        """The part of the logical parameter that `rank` holds."""
        coordinates = mesh.coordinates(rank)
        box = [(0, length) for length in self.shape]
        for dim, axis in self.sharded:
            box[dim] = part(self.shape[dim], mesh.length(axis), coordinates[axis])
        return tuple(box)

    def replicated_over(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes along which every rank holds the same box."""
        axes = {axis for _, axis in self.sharded}
        return tuple(axis for axis in mesh.axes if axis not in axes)
