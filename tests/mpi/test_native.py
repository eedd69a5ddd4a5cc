"""MPI's own collectives as the contract offers them: every operation, type and reduction against NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpctrain.contracts import NativeCall
from hpctrain.dtypes import DTYPES, OPERATIONS
from hpctrain.errors import TransportError
from hpctrain.plan.algorithms import ALGORITHMS
from hpctrain.transport.mpi import MESSAGE_LIMIT, MpiTransport
from hpctrain.transport.native import MpiNative

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
ADDING = ("reduce", "all_reduce", "reduce_scatter")
MOVING = ("broadcast", "scatter", "gather", "all_gather", "all_to_all")
NUMPY = [name for name in DTYPES if name != "bfloat16"]
WAYS = ("run", "start")
SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank

several = pytest.mark.skipif(SIZE == 1, reason="a group of one rank asks no library")


@pytest.fixture(scope="module")
def native() -> Any:
    """Also on one rank, for which the transport has none."""
    return MpiNative(MPI.COMM_WORLD.Dup(), MESSAGE_LIMIT)


def go(native: MpiNative, way: str, **call: Any) -> None:
    if way == "run":
        native.run(NativeCall(**call))
        return
    request = native.start(NativeCall(**call))
    while not request.done():
        os.sched_yield()
    request.wait()


def counts_of() -> list[int]:
    """Elements a rank, some of them none."""
    return [0, 3, 1, 5, 0][:SIZE] if SIZE > 1 else [4]


def offsets(counts: list[int]) -> list[int]:
    return [sum(counts[:r]) for r in range(len(counts) + 1)]


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """Small numbers, different for each rank, zeros among them."""
    made = (np.arange(count) * (2 * rank + 1) + rank) % 4
    return (made + 1j * (made % 3) if dtype.startswith("complex") else made).astype(dtype)


def reduced(reduction: str, count: int, dtype: str) -> np.ndarray:
    result = values(0, count, dtype)
    for rank in range(1, SIZE):
        result = REDUCTIONS[reduction](result, values(rank, count, dtype)).astype(dtype)
    return result


def memory(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8)) if array.size else memoryview(bytearray())


def same(array: np.ndarray, expected: np.ndarray) -> None:
    assert array.dtype == expected.dtype and array.tolist() == expected.tolist()


def pairs() -> list[tuple[str, str]]:
    """Each reduction and type on which the library may be asked to add."""
    kinds = dict.fromkeys(("sum", "prod"), "float int complex")
    kinds |= dict.fromkeys(("min", "max", "band", "bor", "bxor"), "int")
    kinds |= dict.fromkeys(("logical_and", "logical_or", "logical_xor"), "int bool")
    return [(reduction, row.name) for reduction, names in kinds.items() for row in DTYPES.values()
            if row.kind in names.split() and row.name not in ("float16", "bfloat16")]


def test_what_is_offered(native: MpiNative) -> None:
    for reduction in OPERATIONS:
        for dtype in DTYPES:
            for operation in ADDING:
                assert native.offers(operation, reduction, dtype, 100) == ((reduction, dtype) in pairs())
    assert all(native.offers(operation, "", dtype, 0) for operation in MOVING for dtype in DTYPES)
    assert set(ALGORITHMS) == {*ADDING, *MOVING}
    assert not native.offers("scan", "sum", "float32", 4) and not native.offers("broadcast", "", "text", 4)


def test_what_is_too_long_is_not_offered() -> None:
    communicator = MPI.COMM_WORLD
    small, large = MpiNative(communicator, 1000), MpiNative(communicator, 1 << 40)
    assert small.offers("all_reduce", "sum", "float32", 1000) and not small.offers("all_reduce", "sum", "float32", 1001)
    assert large.offers("broadcast", "", "uint8", 2**31 - 1) and not large.offers("broadcast", "", "uint8", 2**31)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction, dtype", pairs())
def test_reductions(native: MpiNative, reduction: str, dtype: str, way: str) -> None:
    call = {"dtype": dtype, "reduction": reduction}
    for count in (0, 7):
        expected = reduced(reduction, count, dtype)
        mine, result = values(RANK, count, dtype), np.empty(count, dtype)
        go(native, way, operation="all_reduce", source=memory(mine), target=memory(result), **call)
        same(result, expected)
        same(mine, values(RANK, count, dtype))
        both = memory(mine)
        go(native, way, operation="all_reduce", source=both, target=both, **call)
        same(mine, expected)
        for root in range(SIZE):
            mine, result = values(RANK, count, dtype), np.empty(count, dtype)
            target = memory(result) if root == RANK else None
            go(native, way, operation="reduce", source=memory(mine), target=target, root=root, **call)
            same(mine, values(RANK, count, dtype))
            both = memory(mine)
            go(native, way, operation="reduce", source=both, target=both, root=root, **call)
            if root == RANK:
                same(result, expected)
                same(mine, expected)
            else:
                same(mine, values(RANK, count, dtype))
    reduce_scatter(native, way, call, [3] * SIZE, None)
    reduce_scatter(native, way, call, counts_of(), counts_of())


def reduce_scatter(native: MpiNative, way: str, call: dict[str, Any], parts: list[int], counts: Any) -> None:
    bounds = offsets(parts)
    start, stop = bounds[RANK], bounds[RANK + 1]
    mine, result = values(RANK, bounds[-1], call["dtype"]), np.empty(stop - start, call["dtype"])
    expected = reduced(call["reduction"], bounds[-1], call["dtype"])[start:stop]
    call = {**call, "operation": "reduce_scatter", "counts": counts, "source": memory(mine)}
    go(native, way, target=memory(result), **call)
    same(result, expected)
    same(mine, values(RANK, bounds[-1], call["dtype"]))
    go(native, way, target=memory(mine[start:stop]), **call)
    same(mine[start:stop], expected)
    rest = np.r_[0:start, stop : bounds[-1]]
    same(mine[rest], values(RANK, bounds[-1], call["dtype"])[rest])


def marked(rank: int, count: int, dtype: str) -> np.ndarray:
    return (np.arange(count) % 20 + 20 * rank + 1).astype(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("even", [True, False])
def test_movements(native: MpiNative, dtype: str, way: str, even: bool) -> None:
    parts = [3] * SIZE if even else counts_of()
    bounds = offsets(parts)
    own = slice(bounds[RANK], bounds[RANK + 1])
    call = {"dtype": dtype, "counts": None if even else parts}
    everybody = np.concatenate([marked(r, parts[r], dtype) for r in range(SIZE)])
    for root in range(SIZE):
        scatter(native, way, {**call, "root": root}, own, marked(root, bounds[-1], dtype))
        gather(native, way, {**call, "root": root}, own, everybody)
    result = np.zeros(bounds[-1], dtype)
    go(native, way, operation="all_gather", source=memory(everybody[own].copy()), target=memory(result), **call)
    same(result, everybody)
    for inside in (False, True):
        result = np.zeros(bounds[-1], dtype)
        result[own] = everybody[own]
        source = memory(result[own]) if inside else None
        go(native, way, operation="all_gather", source=source, target=memory(result), **call)
        same(result, everybody)


def scatter(native: MpiNative, way: str, call: dict[str, Any], own: slice, whole: np.ndarray) -> None:
    call = {**call, "operation": "scatter"}
    is_root = call["root"] == RANK
    given, result = whole.copy(), np.zeros(own.stop - own.start, whole.dtype)
    go(native, way, source=memory(given) if is_root else None, target=memory(result), **call)
    same(result, whole[own])
    for target in (memory(given[own]), None) if is_root else (memory(result), memory(result)):
        result[:] = 0
        go(native, way, source=memory(given) if is_root else None, target=target, **call)
        same(given if is_root else result, whole if is_root else whole[own])


def gather(native: MpiNative, way: str, call: dict[str, Any], own: slice, everybody: np.ndarray) -> None:
    call = {**call, "operation": "gather"}
    is_root = call["root"] == RANK
    result = np.zeros(len(everybody), everybody.dtype)
    go(native, way, source=memory(everybody[own].copy()), target=memory(result) if is_root else None, **call)
    if is_root:
        same(result, everybody)
    for inside in (True, False):
        result[:] = 0
        result[own] = everybody[own]
        source = memory(result[own]) if inside or not is_root else None
        go(native, way, source=source, target=memory(result) if is_root else None, **call)
        if is_root:
            same(result, everybody)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_broadcast_and_all_to_all(native: MpiNative, dtype: str, way: str) -> None:
    for root in range(SIZE):
        for count in (0, 1, 50):
            given = marked(RANK, count, dtype)
            side = {"source": memory(given)} if root == RANK else {"target": memory(given)}
            go(native, way, operation="broadcast", dtype=dtype, root=root, **side)
            same(given, marked(root, count, dtype))
            given, result = marked(RANK, count, dtype), np.zeros(count, dtype)
            source = memory(given) if root == RANK else None
            go(native, way, operation="broadcast", dtype=dtype, root=root, source=source, target=memory(result))
            same(result, marked(root, count, dtype))
    even = [[2] * SIZE for _ in range(SIZE)]
    uneven = [[(3 * a + b) % 4 for b in range(SIZE)] for a in range(SIZE)]
    for table, counts in ((even, None), (uneven, (uneven[RANK], [row[RANK] for row in uneven]))):
        given = marked(RANK, sum(table[RANK]), dtype)
        arriving = [row[RANK] for row in table]
        expected = np.concatenate([
            marked(r, sum(table[r]), dtype)[sum(table[r][:RANK]) :][: table[r][RANK]] for r in range(SIZE)])
        result = np.zeros(sum(arriving), dtype)
        call = {"operation": "all_to_all", "dtype": dtype, "counts": counts}
        go(native, way, source=memory(given), target=memory(result), **call)
        same(result, expected)
    given = marked(RANK, 2 * SIZE, dtype)
    go(native, way, operation="all_to_all", dtype=dtype, source=memory(given), target=memory(given))
    same(given, np.concatenate([marked(r, 2 * SIZE, dtype)[2 * RANK : 2 * RANK + 2] for r in range(SIZE)]))


@pytest.mark.parametrize("count", [1, 100, 5_000, 200_000])
def test_some_ranks_in_place_and_others_not(native: MpiNative, count: int) -> None:
    mine = values(RANK, count, "int64")
    result = mine if RANK % 2 else np.empty_like(mine)
    go(native, "run", operation="all_reduce", dtype="int64", reduction="sum", source=memory(mine),
       target=memory(result))
    same(result, reduced("sum", count, "int64"))
    whole = np.zeros((SIZE, count), np.int64)
    whole[RANK] = RANK + 1
    source = memory(whole[RANK]) if RANK % 2 else memory(whole[RANK].copy())
    go(native, "run", operation="all_gather", dtype="int64", source=source, target=memory(whole.reshape(-1)))
    assert (whole == np.arange(1, SIZE + 1)[:, None]).all()
    whole[:] = RANK
    target = whole.reshape(-1) if RANK % 2 else np.empty(SIZE * count, np.int64)
    go(native, "run", operation="all_to_all", dtype="int64", source=memory(whole.reshape(-1)), target=memory(target))
    assert (target.reshape(SIZE, count) == np.arange(SIZE)[:, None]).all()


def test_words_of_all_ranks(native: MpiNative) -> None:
    for turn in range(50):
        words = native.all_gather_words((turn * 10 + RANK, 2**40 + RANK, -RANK))
        assert words == [(turn * 10 + r, 2**40 + r, -r) for r in range(SIZE)]
    assert native.all_gather_words((-1, -1, 2**62)) == [(-1, -1, 2**62)] * SIZE


@several
def test_a_barrier_waits_for_all_and_orders_stores() -> None:
    transport = MpiTransport()
    assert transport.native is not None
    memory = transport.allocate(64)
    place = transport.place(memory)
    assert place is not None
    meet: dict[str, Callable[[], Any]] = {
        "barrier": transport.native.barrier,
        "words": lambda: transport.native.all_gather_words((*place, 7)),
    }
    for turn in range(50):
        for barrier in meet.values():
            memory[0] = turn + 1
            barrier()
            assert [transport.view(r, place, 1)[0] for r in range(SIZE)] == [turn + 1] * SIZE
            barrier()
            memory[0] = 0
            barrier()
            assert [transport.view(r, place, 1)[0] for r in range(SIZE)] == [0] * SIZE
            barrier()
    transport.close()


@several
def test_several_works_at_once_beside_messages() -> None:
    transport = MpiTransport()
    assert transport.native is not None
    arrays = [np.full(100, RANK + turn) for turn in range(5)]
    into = bytearray(3)
    receive = transport.recv(memoryview(into), (RANK - 1) % SIZE, 0)
    requests = [transport.native.start(NativeCall("all_reduce", "int64", "sum", memory(a), memory(a))) for a in arrays]
    send = transport.send(memoryview(b"abc"), (RANK + 1) % SIZE, 0)
    for request in [*requests, receive, send]:
        request.wait()
    assert bytes(into) == b"abc"
    for turn, array in enumerate(arrays):
        same(array, np.full(100, sum(range(SIZE)) + SIZE * turn))
    transport.close()
    for refused in (transport.native.barrier, lambda: transport.native.all_gather_words((0, 0, 0)),
                    lambda: go(transport.native, "run", operation="all_gather", target=memory(np.zeros(SIZE))),
                    lambda: go(transport.native, "start", operation="broadcast", target=memory(np.zeros(1)))):
        with pytest.raises(TransportError, match="closed"):
            refused()
