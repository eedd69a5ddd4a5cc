"""From the [mesh] section to a mesh of as many ranks as the job has.

Owns the rule for a data axis without a length. Must not know how ranks are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpctrain.errors import ConfigError
from hpctrain.plan.mesh import Mesh

__all__ = ["fill_mesh"]


def fill_mesh(lengths: Sequence[tuple[str, int]], num_ranks: int | None) -> Mesh:
    """The mesh with `lengths`; a data axis of length 0 (or none) takes the ranks that remain of `num_ranks`.

    With `num_ranks` None (no job, as in `hpctrain plan`) the config decides, and an open data axis is 1 long.

    Raises:
        ConfigError: lengths that cannot give `num_ranks`; says which number of ranks would do.
    """
    axes = dict(lengths)
    axes.setdefault("data", 0)
    others = prod(length for axis, length in axes.items() if axis != "data")
    shown = " x ".join(f"{axis} {length}" for axis, length in axes.items() if length)
    if axes["data"] == 0:
        if num_ranks is not None and (others < 1 or num_ranks % others):
            raise ConfigError(f"mesh: {num_ranks} ranks do not divide by {shown} = {others}; "
                              f"start a multiple of {others} ranks")
        axes["data"] = 1 if num_ranks is None else num_ranks // others
    mesh = Mesh(axes)
    if num_ranks is not None and mesh.size != num_ranks:
        raise ConfigError(f"mesh: {shown} = {mesh.size}, but the job has {num_ranks} ranks; start {mesh.size} ranks, "
                          f"or leave mesh.data out so that it takes what is there")
    return mesh
