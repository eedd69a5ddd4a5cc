"""Which shared allocations a group sees, and where memory lies in them: what is behind `Transport.place` and `view`.

A rank keeps one table for its transport and all groups made of it. An allocation is seen by every group whose ranks all
took part in it: by the group that made it, by its subgroups, by another group of the same ranks. Its number is one more
than the highest that any of these ranks had given before (a logical clock: Lamport 1978), so it is the same on all of
them, and none of them knows another allocation by it.

Owns the table and the search in it. Knows neither how memory came to be shared, nor messages. All calls are local.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.contracts import Place

__all__ = ["Allocation", "Places", "Table", "address_of"]

_byte_at = ctypes.c_char.from_buffer
_addressof = ctypes.addressof


def address_of(memory: memoryview) -> int:
    """Where writable memory of at least one byte begins."""
    return _addressof(_byte_at(memory))


@dataclass(eq=False, slots=True)
class Allocation:
    """One allocation, as one rank sees it. Ranks are numbered as in the table's whole transport.

    `own` is this rank's part, None once its last view is gone. The others' parts stay mapped until nobody of the node
    holds one: whoever still has memory of this allocation may use it together with ranks that have none any more.
    """

    number: int
    ranks: frozenset[int]  # who took part
    num_bytes: int  # of each rank's part
    own: Callable[[], mmap.mmap | None]
    parts: Mapping[int, tuple[mmap.mmap, int]]  # other rank of this node: where its part begins in which mapping
    holders: set[int]  # ranks of this node not known to have given up their part
    address: int = 0  # of this rank's part


class Table:
    """The shared allocations of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last = 0  # the highest number given
        self.groups: set[frozenset[int]] = set()  # those that have allocated shared memory, ever
        self.allocations: dict[int, Allocation] = {}  # by number
        self.order: tuple[list[int], list[Allocation]] = ([], [])  # by address; replaced, never changed

    def held(self) -> tuple[int, ...]:
        """The numbers of the allocations of which this rank still has its part."""
        return tuple(a.number for a in list(self.allocations.values()) if a.own() is not None)

    def learn(self, told: Mapping[int, Sequence[int]]) -> None:
        """Takes what each of some ranks said of `held`; forgets the allocations that nobody of this node holds."""
        for number, allocation in list(self.allocations.items()):
            allocation.holders -= {rank for rank, held in told.items() if number not in held}
            if not allocation.holders:
                del self.allocations[number]

    def add(self, allocation: Allocation) -> memoryview:
        """Enters a new allocation; gives this rank's part of it."""
        own = allocation.own()
        assert own is not None and allocation.number > self.last
        allocation.address = address_of(memoryview(own))
        self.last = allocation.number
        self.groups.add(allocation.ranks)
        self.allocations[allocation.number] = allocation
        # Those without a part of ours are left out: their addresses may be in use for something else by now.
        kept = sorted((a for a in self.allocations.values() if a.own() is not None), key=lambda a: a.address)
        self.order = [a.address for a in kept], kept
        return memoryview(own)[: allocation.num_bytes]


class Places:
    """What one group sees.

    Attributes:
        ranks: the group's ranks, numbered as in the table's whole transport.
        everyone: the same as a set.
        node_ranks: the ranks of this group on this rank's node, numbered as in the group.
        possible: whether some node has two ranks of the group, without which nothing is shared.
    """

    def __init__(self, table: Table, ranks: Sequence[int], nodes: Sequence[object], rank: int) -> None:
        """`nodes[r]` tells the node of the group's rank r; `rank` is this one."""
        self.table, self.ranks, self.everyone = table, tuple(ranks), frozenset(ranks)
        self._nodes = tuple(nodes)
        self.node_ranks = tuple(r for r, node in enumerate(nodes) if node == nodes[rank])
        self.possible = len(set(nodes)) < len(nodes)
        self._sees: dict[frozenset[int], bool] = {}  # of each set of ranks that allocated: whether it holds ours
        self._shares = False

    def subgroup(self, ranks: Sequence[int], rank: int) -> Places:
        """The places of `ranks` of this group; `rank` is this one's number there."""
        return Places(self.table, [self.ranks[r] for r in ranks], [self._nodes[r] for r in ranks], rank)

    @property
    def shares(self) -> bool:
        """See `contracts.Transport`."""
        if not self._shares and self.possible:
            self._shares = any(self.everyone <= group for group in self.table.groups)
        return self._shares

    def place(self, memory: memoryview) -> Place | None:
        """See `contracts.Transport`."""
        length = len(memory)
        addresses, allocations = self.table.order
        if not addresses or not length or memory.readonly or not self.possible:
            return None
        address = _addressof(_byte_at(memory))
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        found = allocations[index]
        offset = address - found.address
        if offset + length > found.num_bytes or found.own() is None:
            return None
        sees = self._sees.get(found.ranks)
        if sees is None:
            sees = self._sees[found.ranks] = self.everyone <= found.ranks
        return (found.number, offset) if sees else None

    def view(self, rank: int, place: Place, num_bytes: int) -> memoryview:
        """See `contracts.Transport`."""
        number, offset = place
        allocation, member = self.table.allocations[number], self.ranks[rank]
        assert 0 <= offset <= offset + num_bytes <= allocation.num_bytes, f"{place} has no {num_bytes} bytes"
        if member == self.table.rank:
            own = allocation.own()
            assert own is not None, f"this rank has no memory at {place} any more"
            return memoryview(own)[offset : offset + num_bytes]
        assert member in allocation.parts, f"rank {rank} is not on this rank's node, or has no part of {place}"
        mapping, start = allocation.parts[member]
        return memoryview(mapping)[start + offset : start + offset + num_bytes]
