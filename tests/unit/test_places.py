"""The table of shared allocations: what is found in it, and what only looks like it."""

from __future__ import annotations

import mmap

import pytest

from hpctrain.transport.places import Allocation, Places, Table, address_of

PAGE = mmap.PAGESIZE


def entered(table: Table, number: int, num_bytes: int, memory: mmap.mmap,
            ranks: tuple[int, ...] = (0, 1)) -> list[bool]:
    """Enters an allocation; empty the list that comes back to let this rank's part go."""
    held = [True]
    others = {rank: (mmap.mmap(-1, PAGE), 0) for rank in ranks if rank != table.rank}
    table.add(Allocation(number, frozenset(ranks), num_bytes, lambda: memory if held else None, others, set(ranks)))
    return held


def test_only_what_is_wholly_inside_is_found() -> None:
    table, memory = Table(0), mmap.mmap(-1, 4 * PAGE)
    entered(table, 1, 100, memory)
    places, view = Places(table, (0, 1), (0, 0), 0), memoryview(memory)
    assert places.place(view[:100]) == (1, 0) and places.place(view[99:100]) == (1, 99)
    for start, stop in ((0, 101), (99, 101), (100, 101), (100, 4 * PAGE), (5, 5)):
        assert places.place(view[start:stop]) is None
    assert places.place(memoryview(mmap.mmap(-1, PAGE))) is None


def test_a_part_that_is_gone_hides_nothing_that_lies_there_now() -> None:
    table, memory = Table(0), mmap.mmap(-1, 4 * PAGE)
    first = entered(table, 1, PAGE, mmap.mmap(-1, PAGE))
    table.allocations[1].address = address_of(memoryview(memory)) + PAGE
    first.clear()
    entered(table, 2, 4 * PAGE, memory)
    places = Places(table, (0, 1), (0, 0), 0)
    assert places.place(memoryview(memory)[PAGE + 5 :]) == (2, PAGE + 5)
    assert len(places.view(1, (1, 3), 10)) == 10, "the others' parts can still be reached"
    with pytest.raises(AssertionError, match="any more"):
        places.view(0, (1, 3), 10)


def test_an_allocation_is_forgotten_when_all_of_the_node_have_told_that_they_hold_it_no_more() -> None:
    table = Table(0)
    held = entered(table, 3, 10, mmap.mmap(-1, PAGE), (0, 1, 2))
    entered(table, 7, 10, mmap.mmap(-1, PAGE), (0, 1))
    assert table.held() == (3, 7)
    table.learn({0: (3, 7), 1: (7,)})
    table.learn({0: table.held(), 2: (5,)})
    assert set(table.allocations) == {3, 7}
    held.clear()
    table.learn({0: table.held()})
    assert set(table.allocations) == {7}


def test_who_sees_what() -> None:
    table, memory = Table(5), mmap.mmap(-1, PAGE)
    world = Places(table, range(8), [0] * 6 + [1, 1], 5)
    pair, lonely, triple = world.subgroup((6, 5, 4), 1), world.subgroup((5, 7), 0), world.subgroup((1, 4, 5), 2)
    assert [p.node_ranks for p in (world, pair, lonely, triple)] == [tuple(range(6)), (1, 2), (0,), (0, 1, 2)]
    entered(table, 4, 10, memory, (4, 5, 6))
    views = memoryview(memory)[:10]
    assert [p.shares for p in (world, pair, lonely, triple)] == [False, True, False, False]
    assert [p.place(views) for p in (world, pair, lonely, triple)] == [None, (4, 0), None, None]
    entered(table, 9, 10, mmap.mmap(-1, PAGE), tuple(range(8)))
    assert [p.shares for p in (world, pair, lonely, triple)] == [True, True, False, True]
