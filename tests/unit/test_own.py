"""Own ranges of a flat buffer and the pieces that are updated at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from hpctrain.errors import UnsupportedError
from hpctrain.optim.own import OwnBuffer, Piece, chunks, element_pieces, tensor_pieces
from hpctrain.plan.flat import flat_layouts
from hpctrain.plan.placement import Placement

# a [0, 3)   b [16, 19)   c [32, 32)   d [32, 37)    48 elements in all
COUNTS = {"a": 3, "b": 3, "c": 0, "d": 5}
(LAYOUT,) = flat_layouts(Placement(name, (count,), "float32") for name, count in COUNTS.items())
ALL = frozenset("abcd")


def own(*ranges: tuple[int, int]) -> OwnBuffer:
    return OwnBuffer(LAYOUT, "float32", ranges, [])


def test_own_arrays_have_no_gaps() -> None:
    assert own((2, 5), (30, 34)).offsets == (0, 3, 7)
    assert (own().count, own((2, 5), (30, 34)).count) == (0, 7)


def test_pieces_are_cut_by_ranges_tensors_and_the_limit() -> None:
    b = own((1, 18), (30, 48))
    assert list(element_pieces(b, ALL, 100)) == [Piece(0, 0, 17, 0), Piece(1, 0, 7, 17)]
    assert list(element_pieces(b, frozenset("bd"), 100)) == [Piece(0, 15, 17, 15), Piece(1, 0, 7, 17)]
    assert list(element_pieces(b, frozenset("ad"), 3)) == [Piece(0, 0, 2, 0), Piece(1, 2, 5, 19), Piece(1, 5, 7, 22)]
    assert list(element_pieces(own(), ALL, 3)) == []


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_every_element_is_in_one_piece(limit: int) -> None:
    cuts = [0, 1, 1, 17, 33, 36, 48]
    held: list[int] = []
    for half in (frozenset("ac"), frozenset("bd")):
        for low, high in pairwise(cuts):
            b = own((low, high)) if low < high else own()
            for piece in element_pieces(b, half, limit):
                assert piece.stop - piece.start <= limit
                held += range(low + piece.start, low + piece.stop)
    assert len(held) == len(set(held)), "an element twice"
    padding = {*range(3, 16), *range(19, 32)}  # may come along
    assert set(held) - padding == {0, 1, 2, 16, 17, 18, 32, 33, 34, 35, 36}


def test_whole_tensors() -> None:
    pieces = list(tensor_pieces(own((0, 16), (32, 48)), ALL, "LAMB"))
    assert pieces == [Piece(0, 0, 3, 0, "a"), Piece(1, 0, 5, 16, "d")]
    with pytest.raises(UnsupportedError, match="LAMB needs whole tensors.* 2 of 5 elements of 'd'.*'tensor'"):
        list(tensor_pieces(own((0, 34)), ALL, "LAMB"))


def test_chunks_keep_the_order_and_the_limit() -> None:
    def pieces(*counts: int) -> Iterator[Piece]:
        return (Piece(0, 0, count, 0) for count in counts)

    cut = [[p.stop for p in chunk] for chunk in chunks(pieces(3, 3, 9, 1, 5), 6)]
    assert cut == [[3, 3], [9], [1, 5]]
    assert list(chunks(pieces(), 6)) == []
