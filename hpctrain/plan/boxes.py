"""Box arithmetic: which part of a tensor is where, as integers.

A box is one half-open interval for each dim. A flat range [a, b) of a tensor in C order is at most 2N - 1 boxes:

    shape (4, 6), range [9, 21)        . . . . . .
                                       . . . a a a      a: (1, 2) x (3, 6)
                                       b b b b b b      b: (2, 3) x (0, 6)
                                       c c c . . .      c: (3, 4) x (0, 3)

Loading a checkpoint on another layout is nothing but intersections of such boxes. Pure, standard library only; knows
neither files nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from hpctrain.plan.placement import Box

__all__ = ["extents", "intersect", "range_boxes", "relative", "runs", "runs_within", "volume", "whole"]


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of `shape`."""
    return tuple((0, length) for length in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of `box`; negative intervals count as empty."""
    return tuple(max(0, stop - start) for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements; 1 for the box () of a scalar."""
    return prod(extents(box))


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None where it is empty."""
    assert len(one) == len(other), f"boxes of {len(one)} and {len(other)} dims"
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if volume(common) else None


def relative(box: Box, storage: Box) -> Box:
    """`box` in the coordinates of `storage`, which contains it."""
    assert len(box) == len(storage), f"boxes of {len(box)} and {len(storage)} dims"
    assert all(c <= a and b <= d for (a, b), (c, d) in zip(box, storage, strict=True)), f"{box} is not in {storage}"
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, storage, strict=True))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The flat range [start, stop) of a tensor of `shape` in C order as at most 2N - 1 boxes, in order.

    Raises ValueError when the range is not within the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range [{start}, {stop}) must lie in [0, {prod(shape)}], all of shape {tuple(shape)}")
    if start == stop:
        return []
    return _range_boxes(tuple(shape), start, stop)


def _range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # inside one row
        return [((first, first + 1), *rest) for rest in _range_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [((first, first + 1), *rest) for rest in _range_boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    if tail:
        boxes += [((last, last + 1), *rest) for rest in _range_boxes(shape[1:], 0, tail)]
    return boxes


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The contiguous pieces (offset, length) of `box` in a tensor of `shape`, in C order, as long as they can be.

    Their order is that of the box's own C order, so the pieces laid end to end are the box's content.
    """
    assert len(box) == len(shape), f"a box of {len(box)} dims in a tensor of {len(shape)}"
    if not volume(box):
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # dims from `inner` on are covered whole
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if inner == 0:
        yield 0, volume(box)
        return
    cut = inner - 1  # the one dim that is cut and still contiguous
    length = (box[cut][1] - box[cut][0]) * strides[cut]
    base = box[cut][0] * strides[cut]
    cut_box = zip(box[:cut], strides[:cut], strict=True)
    outer = [range(start * stride, stop * stride, stride) for (start, stop), stride in cut_box]
    for offsets in product(*outer):
        yield base + sum(offsets), length


def runs_within(box: Box, storage: Box) -> Iterator[tuple[int, int]]:
    """The contiguous pieces (offset, length) of `box` in memory that holds the box `storage` in C order."""
    return runs(relative(box, storage), extents(storage))
