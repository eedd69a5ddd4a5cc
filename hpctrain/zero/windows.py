"""Memory that buckets pass through: a few blocks as large as the largest bucket, taken and given back.

Owns the blocks. Knows not what is in them.
"""

from __future__ import annotations

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays
from hpctrain.dtypes import dtype_of

__all__ = ["Windows"]


class Windows:
    """Blocks of `count` elements, from the transport, so that neighbours can read them in place.

    Collective over the group to make. When all are taken there is plain memory, which works as well but must be sent.
    """

    def __init__(self, group: Group, arrays: Arrays, dtype: str, count: int, number: int) -> None:
        self._arrays, self._dtype, self._count = arrays, dtype, count
        num_bytes = count * dtype_of(dtype).num_bytes
        self._free = [arrays.from_memory(group.transport.allocate(num_bytes), dtype) for _ in range(number)]

    @property
    def blocks(self) -> tuple[Array, ...]:
        """The blocks that are not taken."""
        return tuple(self._free)

    @property
    def dry(self) -> bool:
        """Whether all blocks are taken."""
        return not self._free

    def take(self) -> Array:
        """A block, values undefined."""
        return self._free.pop() if self._free else self._arrays.empty(self._count, self._dtype)

    def give(self, block: Array) -> None:
        """Takes back a block."""
        self._free.append(block)
