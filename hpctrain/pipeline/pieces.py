"""Arrays that all ranks of a tensor group hold alike, in pieces: scatter/gather (arXiv 2104.04473, section 4.1).

    tensor rank 0   [a b c]  -- a -->  [a . .]  -+
                1   [a b c]  -- b -->  [. b .]   |- all-gather within the receiving group: [a b c] on each
                2   [a b c]  -- c -->  [. . c]  -+

From stage to stage, thus from node to node, such an array travels once, and not once for each tensor rank. A piece is
received at its place in the whole array. Pieces differ in length where the group does not divide the array, and may be
empty. Owns what is cut, and where; knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

from hpctrain.collectives import Group
from hpctrain.collectives.layout import elements
from hpctrain.contracts import Array, ArraysOf
from hpctrain.dtypes import dtype_of
from hpctrain.errors import MismatchError
from hpctrain.pipeline.nest import Leaf
from hpctrain.plan.split import bounds, part

__all__ = ["LEAST_BYTES", "Replicas"]

#: Smaller arrays go whole from each rank: an all-gather would take longer than what it spares.
LEAST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Replicas:
    """The tensor group of this rank's stages, and what goes in pieces between it and those of the neighbours.

    Rank t of one group talks to rank t of the next, so all tensor groups of a pipeline are equally large. All ranks of
    a group run one schedule on the same micro-batches, so they come to these collective calls in the same order.

    Attributes:
        group: the tensor group; used for nothing else, or by models that run the same code on all of its ranks.
        arrays_of: of any array.
        least_bytes: smaller arrays go whole; the same on all ranks of the pipeline.
        checked: what is sent as replicated is compared over the group first, at the price of a fingerprint of each
            array and an exchange a message; the same on all ranks of the group.
    """

    group: Group
    arrays_of: ArraysOf
    least_bytes: int = LEAST_BYTES
    checked: bool = False

    def cuts(self, leaf: Leaf) -> bool:
        """Whether such an array goes in pieces: known to both ends from the form. Local."""
        return leaf.replicated and prod(leaf.shape) * dtype_of(leaf.dtype).num_bytes >= self.least_bytes

    def piece(self, array: Array, leaf: Leaf) -> Array:
        """What this rank sends, or receives in place, of a contiguous array: a view of its piece, or all. Local."""
        if not self.cuts(leaf):
            return array
        start, stop = part(prod(leaf.shape), self.group.size, self.group.rank)
        return elements(self.arrays_of(array), array)[start:stop]

    def complete(self, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Fills contiguous arrays, of which each rank has its piece, in place. Collective over the group."""
        for array, leaf in zip(arrays, leaves, strict=True):
            if self.cuts(leaf):
                borders = bounds(prod(leaf.shape), self.group.size)
                self.group.all_gather_into(self.arrays_of(array).flat(array), borders, name="pieces from a stage")

    def check(self, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Compares replicated arrays, where that was asked for. Collective over the group.

        Raises:
            MismatchError: one differs from rank to rank. On all ranks of the group alike.
        """
        if not self.checked:
            return
        mine = [f"{leaf.dtype} of shape {leaf.shape} {self._fingerprint(array)}"
                for array, leaf in zip(arrays, leaves, strict=True) if leaf.replicated]
        told = self.group.exchange(mine)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise MismatchError(f"arrays that a stage calls replicated differ between tensor ranks 0 and {rank}: "
                                    f"{told[0]} and {theirs} (type, shape, fingerprint); see Model.replicated")

    def _fingerprint(self, array: Array) -> str:
        arrays = self.arrays_of(array)
        return blake2b(arrays.memory(elements(arrays, array)), digest_size=8).hexdigest()
