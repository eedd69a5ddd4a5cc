"""What one rank owns of flat buffers, and its cutting into pieces that are updated at once.

    flat buffer    |....|===== own =====|......|== own ==|....|     ranges, in coordinates of the layout
    own arrays          |===============|=========|                 states (and a master): range after range, no gaps

Knows layouts and ranges; not how ranges are dealt out to ranks, not what an update is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.contracts import Array
from hpctrain.errors import UnsupportedError
from hpctrain.optim.groups import merged_ranges
from hpctrain.plan.flat import FlatLayout

__all__ = ["OwnBuffer", "Piece", "chunks", "element_pieces", "tensor_pieces"]


@dataclass(frozen=True)
class OwnBuffer:
    """What this rank owns of one flat buffer.

    `ranges` are [start, stop) of the layout, ascending, apart from each other, maybe none. `masters[i]` is the flat
    array of range i that is updated, of type `dtype`, and `copies[i]` the one that receives it rounded (no copies: the
    masters are the live parameters themselves).
    """

    layout: FlatLayout
    dtype: str
    ranges: tuple[tuple[int, int], ...]
    masters: Sequence[Array]
    copies: Sequence[Array] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each range begins in this rank's own arrays, and at the end their length."""
        offsets = [0]
        for start, stop in self.ranges:
            offsets.append(offsets[-1] + stop - start)
        return tuple(offsets)

    @property
    def count(self) -> int:
        """Elements of each own array."""
        return self.offsets[-1]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of own range `range`; the first lies at `offset` of the own arrays.

    `name` is the tensor where a piece is one whole tensor, else "".
    """

    range: int
    start: int
    stop: int
    offset: int
    name: str = ""

    @property
    def in_range(self) -> slice:
        """Its place in an array of the range (a master, a gradient, a copy)."""
        return slice(self.start, self.stop)

    @property
    def in_own(self) -> slice:
        """Its place in an own array (a state)."""
        return slice(self.offset, self.offset + self.stop - self.start)


def element_pieces(buffer: OwnBuffer, names: frozenset[str], limit: int) -> Iterator[Piece]:
    """What is owned of `names`, neighbours merged across padding, cut to `limit` elements."""
    for low, high in merged_ranges(buffer.layout, names):
        for i, (start, stop) in enumerate(buffer.ranges):
            for first in range(max(low, start), min(high, stop), limit):
                yield _piece(buffer, i, first, min(first + limit, high, stop))


def tensor_pieces(buffer: OwnBuffer, names: frozenset[str], optimizer: str) -> Iterator[Piece]:
    """The tensors of `names` that are owned. Raises UnsupportedError if a range cuts one; `optimizer` is named then."""
    for slot in buffer.layout.slots:
        for i, (start, stop) in enumerate(buffer.ranges):
            first, last = max(slot.start, start), min(slot.stop, stop)
            if slot.name not in names or first >= last:
                continue
            if last - first < slot.stop - slot.start:
                raise UnsupportedError(f"{optimizer} needs whole tensors, but this rank owns {last - first} of "
                                       f"{slot.stop - slot.start} elements of {slot.name!r}; legal is a partition "
                                       "with ownership 'tensor'")
            yield _piece(buffer, i, first, last, slot.name)


def _piece(buffer: OwnBuffer, index: int, first: int, last: int, name: str = "") -> Piece:
    start = first - buffer.ranges[index][0]
    return Piece(index, start, start + last - first, buffer.offsets[index] + start, name)


def chunks(pieces: Iterator[Piece], limit: int) -> Iterator[tuple[Piece, ...]]:
    """Pieces in their order, as many at once as have at most `limit` elements together, but at least one."""
    taken: list[Piece] = []
    total = 0
    for piece in pieces:
        count = piece.stop - piece.start
        if taken and total + count > limit:
            yield tuple(taken)
            taken, total = [], 0
        taken.append(piece)
        total += count
    if taken:
        yield tuple(taken)
