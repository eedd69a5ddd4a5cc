"""Collectives on memory that the neighbours see: no data in messages, every element read where it lies.

    meet            all ranks have come, and all mean the same stretch of memory
    work            rank r owns part r:    own += the neighbours' part r, block by block, each block then stored
                    |r0|r1|r2|r3|          into every neighbour's part r while it is still in cache
    meet            all are through: everybody's memory may be used again

A sum costs one pass over the data, split over the ranks, and two small messages a neighbour and round. Where ranks mean
different stretches (views at other offsets, an array that is not from `allocate`), all of them learn it in the first
meeting and take the way of messages together.

Memory order: what a rank stored before a meeting is seen by all after it, since the message that carries the meeting is
published by its transport with a fence that orders all earlier stores, ours included, and read with one that orders all
later loads.

Owns these three moves. Written against the contracts; knows neither which transport nor which library serves it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from hpctrain.collectives.workspace import Scratch, Workspace
from hpctrain.contracts import Array, Request, Shared, Transport
from hpctrain.plan.split import part

__all__ = ["Neighbours", "all_gather", "all_reduce", "meet", "reduce_scatter", "together"]

BLOCK_BYTES = 256 * 1024  # of a sum: its own block and one neighbour's stay in a core's second-level cache

_Waits = Generator[Request, None, None]
_PLACE = struct.Struct("<qq")
_NOWHERE = (-1, -1)  # not in shared memory
_DIFFERENT = (-2, -2)  # some ranks mean different places


def meet(transport: Transport, tag: int, place: tuple[int, int] = _NOWHERE) -> Generator[Request, None, bool]:
    """Waits until all ranks have come; returns whether all gave the same `place`, and that one is somewhere.

    A dissemination barrier (Hensgen, Finkel, Manber 1988): ceil(log2 p) rounds, one small message each way in each.
    Collective over the transport's group.
    """
    rank, size = transport.rank, transport.size
    distance = 1
    while distance < size:
        arriving = memoryview(bytearray(_PLACE.size))
        receive = transport.recv(arriving, (rank - distance) % size, tag)
        leaving = transport.send(memoryview(_PLACE.pack(*place)), (rank + distance) % size, tag)
        yield receive
        yield leaving
        if _PLACE.unpack(arriving) != place:
            place = _DIFFERENT
        distance *= 2
    return place not in (_NOWHERE, _DIFFERENT)


def together(transport: Transport, tag: int, shared: Shared | None, near: Callable[[Shared], None],
             far: Callable[[], _Waits]) -> _Waits:
    """Runs `near` between two meetings if all ranks have the same shared stretch, else the messages of `far`."""
    same = yield from meet(transport, tag, _NOWHERE if shared is None else shared.place)
    if not same:
        yield from far()
        return
    assert shared is not None
    near(shared)
    yield from meet(transport, tag)


@dataclass(frozen=True)
class Neighbours:
    """One collective on shared memory, between its two meetings. All calls are local.

    `space.target` is this rank's own memory, or (reduce_scatter) the array for this rank's part of the result.
    """

    space: Workspace
    rank: int
    arrays: tuple[Array, ...]  # the same stretch on every rank, this one's included
    scratch: Scratch

    @classmethod
    def of(cls, space: Workspace, rank: int, shared: Shared, scratch: Scratch) -> Neighbours:
        """From the neighbours' bytes."""
        arrays = tuple(space.arrays.from_memory(view, space.dtype) for view in shared.views)
        return cls(space, rank, arrays, scratch)

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank starting with its next one, so that not all read the same memory at once."""
        size = len(self.arrays)
        return [(self.rank + k) % size for k in range(1, size)]

    def reduce(self, start: int, stop: int, targets: Sequence[Array], offset: int = 0) -> None:
        """Reduces the elements [start, stop) of all ranks; stores them in each target, from element start - offset."""
        space, arrays = self.space, self.space.arrays
        length = max(1, BLOCK_BYTES // space.num_bytes)
        wide = space.accumulate != space.dtype
        total, memory = self.scratch.take(arrays, length, space.accumulate) if wide else (None, None)
        others = [self.arrays[rank] for rank in self.others]
        for a in range(start, stop, length):
            b = min(a + length, stop)
            first = targets[0][a - offset : b - offset]
            into = first if total is None else total[: b - a]
            if wide or targets[0] is not self.arrays[self.rank]:
                arrays.assign(into, self.arrays[self.rank][a:b])
            for other in others:
                arrays.combine(space.operation, into, other[a:b])
            if space.factor is not None:
                arrays.scale(into, space.factor)
            if total is not None:
                arrays.assign(first, into)
            for target in targets[1:]:
                arrays.assign(target[a - offset : b - offset], first)
        if memory is not None:
            self.scratch.give(arrays, space.accumulate, total, memory)

    def copy(self, start: int, stop: int, source: int) -> None:
        """Takes the elements [start, stop) from rank `source`."""
        self.space.arrays.assign(self.arrays[self.rank][start:stop], self.arrays[source][start:stop])


def all_reduce(near: Neighbours) -> None:
    """Each rank reduces its part and stores it everywhere."""
    size = len(near.arrays)
    start, stop = part(len(near.arrays[near.rank]), size, near.rank)
    near.reduce(start, stop, [near.arrays[near.rank], *(near.arrays[rank] for rank in near.others)])


def reduce_scatter(near: Neighbours, start: int, stop: int) -> None:
    """Each rank reduces its part [start, stop) into `space.target`, which begins at element `space.offset`."""
    near.reduce(start, stop, [near.space.target], near.space.offset)


def all_gather(near: Neighbours, bounds: Sequence[int]) -> None:
    """Each rank takes the others' parts."""
    for rank in near.others:
        near.copy(bounds[rank], bounds[rank + 1], rank)

