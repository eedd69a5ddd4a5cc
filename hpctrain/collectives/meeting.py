"""Meetings: all ranks of a group have come, and have told each other a few numbers.

Owns what is told and how it travels by small messages, which never block; a caller that may block meets by the
transport's own collectives instead. A meeting also orders memory: see `shared`.

What is told: where the rank's array lies, and a fingerprint of the call. Ranks in different calls, or with different
counts, learn it here, before any data moves.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import NamedTuple

from hpctrain.contracts import Place, Request, Transport

__all__ = ["NOTHING", "NOWHERE", "Told", "barrier", "by_messages"]

NOWHERE: Place = (-1, -1)  # not in shared memory
NOTHING: Place = (0, 0)  # no elements, which nobody will look for

_TOLD = struct.Struct("<qqq")


class Told(NamedTuple):
    """What one rank tells: the place of its array, or NOWHERE, and the fingerprint of its call."""

    allocation: int
    offset: int
    fingerprint: int


def by_messages(transport: Transport, tag: int, mine: Told) -> Generator[Request, None, list[Told]]:
    """All ranks' words, in rank order, by Bruck's all-gather: ceil(log2 p) rounds of one small message each way.

    Collective over the group.
    """
    rank, size, unit = transport.rank, transport.size, _TOLD.size
    told = memoryview(bytearray(size * unit))  # of ranks rank, rank + 1, ...
    _TOLD.pack_into(told, 0, *mine)
    distance = 1
    while distance < size:
        some = min(distance, size - distance)
        arriving = transport.recv(told[distance * unit : (distance + some) * unit], (rank + distance) % size, tag)
        leaving = transport.send(told[: some * unit], (rank - distance) % size, tag)
        yield arriving
        yield leaving
        distance *= 2
    found = [Told(*words) for words in _TOLD.iter_unpack(told)]
    return found[size - rank :] + found[: size - rank]


def barrier(transport: Transport, tag: int, ranks: Sequence[int], index: int) -> Generator[Request, None, None]:
    """Ends when each of `ranks` has begun it, of which this rank is number `index`. Collective over these ranks.

    A dissemination barrier (Hensgen, Finkel, Manber 1988): ceil(log2 p) rounds of one small message each way.
    """
    size, distance = len(ranks), 1
    while distance < size:
        arriving = transport.recv(memoryview(bytearray(1)), ranks[(index - distance) % size], tag)
        leaving = transport.send(memoryview(b"\0"), ranks[(index + distance) % size], tag)
        yield arriving
        yield leaving
        distance *= 2
