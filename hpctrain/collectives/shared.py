"""Collectives on memory that the ranks of a node see: no data in messages, every element read where it lies.

    meet            all ranks have come, and told each other where their arrays lie
    work            a sum: rank r owns part r:   own += the neighbours' part r, block by block, each block then stored
                    |r0|r1|r2|r3|                in every neighbour's part r while it is still in cache
                    a movement: each rank fetches what it gets, or stores what it gives
    meet            all are through: everybody's memory may be used again

A sum costs one pass over the data, split over the ranks, and two small messages a neighbour and round. Between nodes,
each rank exchanges its own part with the ranks at the same place of the other nodes before it stores it.

Memory order: what a rank stored before a meeting is seen by all after it, since the message that carries the meeting is
published by its transport with a fence that orders all earlier stores, ours included, and read with one that orders all
later loads.

Owns these moves. Written against the contracts; knows neither which transport nor which library serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from hpctrain.collectives.workspace import Scratch
from hpctrain.contracts import Array, Arrays, Place, Request, Transport
from hpctrain.plan.split import part

__all__ = ["Move", "Near", "Neighbours", "Sum", "all_gather", "all_reduce", "all_to_all", "broadcast", "fetch",
           "reduce", "reduce_scatter", "store"]

LINE_BYTES = 64
BLOCK_BYTES = 256 * 1024  # its own block and one neighbour's stay in a core's second-level cache

Waits = Generator[Request, None, None]
Move = Callable[["Neighbours"], Waits | None]


@dataclass(slots=True)
class Near:
    """How a collective is carried out on shared memory.

    `memory` is what this rank shows to the others (None: nothing); `shown_by` the rank that must show something, or
    None where all must. `move` runs between the two meetings. `across`: it also serves groups on several nodes.
    """

    memory: memoryview | None
    move: Move
    shown_by: int | None = None
    across: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """What combining means; see `workspace.Workspace`."""

    operation: str
    dtype: str
    accumulate: str
    factor: float | None

    @property
    def wide(self) -> bool:
        """Whether sums are carried in another type than the arrays'."""
        return self.accumulate != self.dtype


@dataclass(slots=True)
class Neighbours:
    """The ranks of this rank's node between two meetings: where each one's array lies. All calls are local.

    `ranks` are theirs in the group, `index` is this rank's position among them, `num_bytes` is of an element.
    `between(operation, array)` reduces an array in place over the nodes; None where there is only one.
    """

    transport: Transport
    arrays: Arrays
    dtype: str
    num_bytes: int
    ranks: Sequence[int]
    index: int
    places: Sequence[Place]
    scratch: Scratch
    between: Callable[[str, Array], Waits] | None = None

    @property
    def others(self) -> list[int]:
        """The other ranks, each starting with its next one, so that not all read the same memory at once."""
        return [*self.ranks[self.index + 1 :], *self.ranks[: self.index]]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.index]

    def piece(self, rank: int, start: int, stop: int) -> Array:
        """Elements [start, stop) of the array that `rank` shows."""
        if start == stop:
            return self.arrays.empty(0, self.dtype)
        place, size = self.places[rank], self.num_bytes
        view = self.transport.view(rank, (place[0], place[1] + start * size), (stop - start) * size)
        return self.arrays.from_memory(view, self.dtype)

    def reduce(self, total: Sum, pieces: Sequence[Array], targets: Sequence[Array]) -> None:
        """Every target becomes the reduction of the pieces, two or more, in order; targets[0] may be pieces[0]."""
        arrays = self.arrays
        count = arrays.shape(pieces[0])[0]
        length = max(1, BLOCK_BYTES // self.num_bytes)
        carried = self.scratch.take(arrays, min(length, count), total.accumulate) if total.wide else None
        for a in range(0, count, length):
            block = slice(a, min(a + length, count))
            first = targets[0][block]
            into, rest = first if carried is None else carried[0][: block.stop - a], pieces[1:]
            if carried is not None:
                arrays.assign(into, pieces[0][block])
            elif targets[0] is not pieces[0]:
                arrays.combine(total.operation, into, rest[0][block], pieces[0][block])
                rest = rest[1:]
            for piece in rest:
                arrays.combine(total.operation, into, piece[block])
            if total.factor is not None:
                arrays.scale(into, total.factor)
            if carried is not None:
                arrays.assign(first, into)
            for target in targets[1:]:
                arrays.assign(target[block], first)
        if carried is not None:
            self.scratch.give(arrays, total.accumulate, *carried)

    def copy(self, source: Array, targets: Sequence[Array]) -> None:
        """Stores `source` in every target, block by block where there are several."""
        if len(targets) == 1:
            self.arrays.assign(targets[0], source)
            return
        count = self.arrays.shape(source)[0]
        length = max(1, BLOCK_BYTES // self.num_bytes)
        for a in range(0, count, length):
            for target in targets:
                self.arrays.assign(target[a : a + length], source[a : a + length])


def all_reduce(near: Neighbours, total: Sum, count: int) -> Waits | None:
    """Each rank reduces its part and stores it everywhere.

    Parts are whole cache lines, as those that `plan.shards` gives to ranks: so a sum has the same bits whether all
    ranks get it or each its own part.
    """
    line = max(1, LINE_BYTES // near.num_bytes)
    start, stop = (min(count, at * line) for at in part(-(-count // line), len(near.ranks), near.index))
    pieces = [near.piece(rank, start, stop) for rank in (near.rank, *near.others)]
    if near.between is not None:
        return _across(near, total, pieces, near.between)
    near.reduce(total, pieces, pieces)
    return None


def _across(near: Neighbours, total: Sum, pieces: list[Array], between: Callable[[str, Array], Waits]) -> Waits:
    """Parts of half types stay in float32 between the nodes, and are rounded once."""
    arrays, mine = near.arrays, pieces[0]
    carried = arrays.empty(arrays.shape(mine)[0], total.accumulate) if total.wide else mine
    if total.wide:
        arrays.assign(carried, mine)
    for piece in pieces[1:]:
        arrays.combine(total.operation, carried, piece)
    yield from between(total.operation, carried)
    if total.factor is not None:
        arrays.scale(carried, total.factor)
    if total.wide:
        arrays.assign(mine, carried)
    near.copy(mine, pieces[1:])


def reduce_scatter(near: Neighbours, total: Sum, start: int, stop: int, target: Array) -> None:
    """Each rank reduces its part [start, stop) into `target`."""
    near.reduce(total, [near.piece(rank, start, stop) for rank in (near.rank, *near.others)], [target])


def reduce(near: Neighbours, total: Sum, root: int, count: int) -> None:
    """Each rank reduces its part into the root's array."""
    start, stop = part(count, len(near.ranks), near.index)
    at = near.ranks.index(root)
    order = (*near.ranks[at:], *near.ranks[:at])
    pieces = [near.piece(rank, start, stop) for rank in order]
    near.reduce(total, pieces, pieces[:1])


def broadcast(near: Neighbours, root: int, count: int) -> None:
    """Each rank takes its part from the root and stores it everywhere else, so that every core copies."""
    start, stop = part(count, len(near.ranks), near.index)
    targets = [near.piece(rank, start, stop) for rank in (near.rank, *near.others) if rank != root]
    near.copy(near.piece(root, start, stop), targets)


def fetch(near: Neighbours, root: int, start: int, stop: int, target: Array) -> None:
    """Takes elements [start, stop) of the root's array (a scatter)."""
    if near.rank != root:
        near.arrays.assign(target, near.piece(root, start, stop))


def store(near: Neighbours, root: int, start: int, stop: int, source: Array) -> None:
    """Stores `source` as elements [start, stop) of the root's array (a gather)."""
    if near.rank != root:
        near.arrays.assign(near.piece(root, start, stop), source)


def all_gather(near: Neighbours, bounds: Sequence[int], target: Array) -> None:
    """Each rank shows its own part and takes the others'."""
    for rank in near.others:
        start, stop = bounds[rank], bounds[rank + 1]
        near.arrays.assign(target[start:stop], near.piece(rank, 0, stop - start))


def all_to_all(near: Neighbours, offsets: Sequence[int], arriving: Sequence[int], target: Array) -> None:
    """Each rank takes its block, which begins at element offsets[s] of rank s's array, from every other rank."""
    for rank in near.others:
        start, stop = arriving[rank], arriving[rank + 1]
        near.arrays.assign(target[start:stop], near.piece(rank, offsets[rank], offsets[rank] + stop - start))
