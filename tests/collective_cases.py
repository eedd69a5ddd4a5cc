"""What collectives must do, as functions of a factory of groups; run on threads and over MPI by tests of that name.

`make(segment_bytes=..., message_limit=...)` gives a group; both limits are optional. Every rank can make every rank's
input, so each compares with the plain definition of the collective.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from hpctrain.collectives import Group
from hpctrain.dtypes import DTYPES, OPERATIONS
from hpctrain.errors import UnsupportedError
from hpctrain.plan import split

Make = Callable[..., Group]
SIZES = (0, 1, 6, 7, 8, 1000, 1001)


def cases_of(*modules: ModuleType) -> list[Callable[[Make], None]]:
    """All cases of these files."""
    functions = [pair for module in modules for pair in inspect.getmembers(module, inspect.isfunction)]
    return [function for name, function in functions if name.startswith("case_")]


def inputs(size: int, count: int, dtype: str = "float32") -> list[np.ndarray]:
    """One array a rank, the same on every rank that asks."""
    random = np.random.default_rng(count)
    values = random.uniform(-100, 100, (size, count))
    return list(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        half = array.dtype == torch.bfloat16
        return array.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if half else array.detach().numpy()
    return array


def as_library(array: np.ndarray, library: str) -> Any:
    if library == "numpy":
        return array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def same_on_all_ranks(group: Group, array: Any) -> bool:
    return len({tuple(row) for row in group.exchange(list(to_numpy(array).tobytes()))}) == 1


# All collectives, cut at any limit (case bank, 9) -------------------------------------------------------------------


def case_every_limit_gives_the_same_bits(make: Make) -> None:
    limits = [{}, {"segment_bytes": 28}, {"segment_bytes": 28, "message_limit": 28}, {"segment_bytes": 4}]
    for count in SIZES:
        results = []
        for limit in limits:
            group = make(**limit)
            data = inputs(group.size, count)
            mine, everyone = data[group.rank], np.concatenate(data)
            reduced = group.all_reduce(mine.copy())
            np.testing.assert_allclose(reduced, np.sum(np.float64(data), axis=0), rtol=1e-5, atol=1e-4)
            start, stop = split.part(count, group.size, group.rank)
            scattered = group.reduce_scatter(mine)
            np.testing.assert_allclose(scattered, np.sum(np.float64(data), axis=0)[start:stop], rtol=1e-5, atol=1e-4)
            np.testing.assert_array_equal(mine, inputs(group.size, count)[group.rank])
            np.testing.assert_array_equal(group.all_gather(mine), everyone)
            for root in range(group.size):
                np.testing.assert_array_equal(group.broadcast(mine.copy(), root), data[root])
            results.append(reduced.tobytes() + scattered.tobytes())
            if count < 100:
                assert same_on_all_ranks(group, reduced)
        assert len(set(results)) == 1


REFERENCE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod,
    "logical_and": np.logical_and.reduce, "logical_or": np.logical_or.reduce, "logical_xor": np.logical_xor.reduce,
    "band": np.bitwise_and.reduce, "bor": np.bitwise_or.reduce, "bxor": np.bitwise_xor.reduce,
}


def small_numbers(size: int, count: int, dtype: str) -> list[np.ndarray]:
    """Integers of -4..3, so that no product overflows, in any dtype; one array a rank."""
    data = [np.abs(a) if dtype.startswith("u") else a for a in inputs(size, count, "float64")]
    kind = inputs(1, 1, dtype)[0].dtype
    return [(a > 0 if dtype == "bool" else a // 32).astype(kind) for a in data]


def reduced(operation: str, data: list[np.ndarray], dtype: str) -> np.ndarray:
    """The plain definition, in a type that is wide enough, rounded to dtype."""
    kind = DTYPES[dtype].kind
    wide = {"float": np.float64, "complex": np.complex128}.get(kind, data[0].dtype)
    return REFERENCE[operation](np.stack([a.astype(wide) for a in data]), axis=0).astype(data[0].dtype)


def assert_close(actual: Any, expected: np.ndarray, dtype: str) -> None:
    """Equal, for integers and bool; else to the accuracy of sums in another order."""
    wide = {"float": np.float64, "complex": np.complex128}.get(DTYPES[dtype].kind)
    if wide is None:
        np.testing.assert_array_equal(to_numpy(actual), expected)
    else:
        limit = 2.0**-7 if DTYPES[dtype].num_bytes == 2 else 1e-5
        np.testing.assert_allclose(to_numpy(actual).astype(wide), expected.astype(wide), rtol=limit, atol=1e-5)


def case_every_dtype_and_operation_is_right_or_refused(make: Make) -> None:
    group = make(segment_bytes=40)
    start, stop = split.part(23, group.size, group.rank)
    for library in ("numpy", "torch"):
        for dtype, row in DTYPES.items():
            data = small_numbers(group.size, 23, dtype)
            for operation, kinds in OPERATIONS.items():
                mine = as_library(data[group.rank], library)
                if row.kind not in kinds:
                    for call in (group.all_reduce, group.start_all_reduce, group.reduce_scatter, group.reduce):
                        with pytest.raises(UnsupportedError, match=f"{operation}.*{dtype}"):
                            call(mine, operation)
                    continue
                expected = reduced(operation, data, dtype)
                assert_close(group.reduce_scatter(mine, operation), expected[start:stop], dtype)
                result = group.reduce(mine, operation, group.size - 1, out=as_library(expected, library))
                if group.rank == group.size - 1:
                    assert_close(result, expected, dtype)
                np.testing.assert_array_equal(to_numpy(mine), data[group.rank])  # all this leaves the input alone
                assert_close(group.all_reduce(mine, operation), expected, dtype)


def case_unknown_operations_and_arrays_are_refused_by_name(make: Make) -> None:
    group = make()
    with pytest.raises(UnsupportedError, match=r"'product'.*'sum', 'mean', 'min', 'max', 'prod'"):
        group.all_reduce(np.zeros(3), "product")
    with pytest.raises(UnsupportedError, match=r"list.*numpy\.ndarray"):
        group.all_reduce([1.0, 2.0])
    with pytest.raises(UnsupportedError, match="datetime64"):
        group.broadcast(np.zeros(3, "datetime64[s]"))
    with pytest.raises(UnsupportedError, match="native byte order"):
        group.broadcast(np.zeros(3, ">f4"))
    with pytest.raises(ValueError, match="root = 99"):
        group.broadcast(np.zeros(3), root=99)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        group.all_reduce(frozen)
    with pytest.raises(UnsupportedError, match=r"'rings'.*did you mean 'ring'.*'naive', 'parameter server'"):
        group.all_reduce(np.zeros(3), algorithm="rings")
    with pytest.raises(ValueError, match="counts"):
        group.reduce_scatter(np.zeros(3), counts=[4] * group.size)
    with pytest.raises(ValueError, match="counts"):
        group.all_to_all(np.zeros(3), counts=[[1]] * (group.size + 1))
    with pytest.raises(UnsupportedError, match="out has dtype 'float32'; legal is 'float64'"):
        group.all_reduce(np.zeros(3), out=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="out has 4 elements; must have 3"):
        group.all_reduce(np.zeros(3), out=np.zeros(4))
    with pytest.raises(UnsupportedError, match="out is an array of torch; legal is numpy"):
        group.all_reduce(np.zeros(3), out=torch.zeros(3))


# Half types (case bank, 10) -----------------------------------------------------------------------------------------


def case_half_sums_are_carried_in_float32_and_rounded_once(make: Make) -> None:
    group = make(segment_bytes=20)
    for dtype, values, total in (("float16", [2048, 1, 1, 2], 2052), ("bfloat16", [256, 1, 1, 2], 260)):
        for library in ("numpy", "torch"):
            for shift in range(4):
                # The values beyond the group's size are added by its last rank, in a form that is exact.
                mine = [values[(i + shift) % 4] for i in range(4)]
                share = float(mine[group.rank]) if group.rank < 4 else 0.0
                if group.size < 4:
                    mine = [float(v) for v in mine]
                    total_here = sum(mine[: group.size])
                else:
                    total_here = total
                array = as_library(np.full(4 * group.size + 3, share).astype(inputs(1, 1, dtype)[0].dtype), library)
                expected = np.float32(total_here).astype(to_numpy(array).dtype).astype(np.float64)
                scattered = to_numpy(group.reduce_scatter(array)).astype(np.float64)
                assert (scattered == expected).all()
                assert (to_numpy(group.all_reduce(array)).astype(np.float64) == expected).all()
                assert same_on_all_ranks(group, array)


def case_half_means_do_not_overflow_on_the_way(make: Make) -> None:
    group = make()
    array = torch.full((9,), 60000.0, dtype=torch.float16)
    assert (group.all_reduce(array, "mean") == 60000.0).all()


# Layouts (case bank, 11) --------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda parent: parent[:16].reshape(4, 4).T,
    "every second column": lambda parent: parent[:16].reshape(4, 4)[:, ::2],
    "shape 1x2x2": lambda parent: parent[4:8].reshape(1, 2, 2),
    "one element, stride 2": lambda parent: parent[6::2][:1],
    "no elements": lambda parent: parent[3:3],
    "storage offset": lambda parent: parent[5:11],
    "scalar": lambda parent: parent[7:8].reshape(()),
    "broadcast dim": lambda parent: parent[2:6].reshape(2, 1, 2),
}


def case_any_layout_means_its_logical_content(make: Make) -> None:
    group = make(segment_bytes=12)
    for library in ("numpy", "torch"):
        for view_of in LAYOUTS.values():
            base = [np.arange(20, dtype=np.float32) + 100 * rank for rank in range(group.size)]
            root = group.size - 1
            expected = {
                "broadcast": lambda b, root=root: b[root],
                "all_reduce": lambda b: np.sum(b, axis=0),
            }
            for name, value_of in expected.items():
                parent = as_library(base[group.rank], library)
                right = base[group.rank].copy()
                view_of(right)[...] = value_of([view_of(b) for b in base])
                view = view_of(parent)
                result = group.broadcast(view, root) if name == "broadcast" else group.all_reduce(view)
                np.testing.assert_array_equal(to_numpy(parent), right)  # outside the view, too
                np.testing.assert_array_equal(to_numpy(result), view_of(right))
            parts = [view_of(b).reshape(-1) for b in base]
            gathered = group.all_gather(view_of(as_library(base[group.rank], library)))
            np.testing.assert_array_equal(to_numpy(gathered), np.concatenate(parts))
            scattered = group.reduce_scatter(view_of(as_library(base[group.rank], library)))
            start, stop = split.part(len(parts[0]), group.size, group.rank)
            np.testing.assert_array_equal(to_numpy(scattered), np.sum(parts, axis=0)[start:stop])


def case_send_and_recv_any_layout(make: Make) -> None:
    group = make()
    for library in ("numpy", "torch"):
        for view_of in LAYOUTS.values():
            parent = as_library(np.arange(20, dtype=np.float32) + 100 * group.rank, library)
            if group.rank == 0:
                for other in range(1, group.size):
                    group.send(view_of(parent), other)
            else:
                right = to_numpy(parent).copy()
                view_of(right)[...] = view_of(np.arange(20, dtype=np.float32))
                group.recv(view_of(parent), 0)
                np.testing.assert_array_equal(to_numpy(parent), right)


def case_five_broadcasts_of_one_buffer(make: Make) -> None:
    group = make()
    for buffer in (np.zeros((3, 3)).T, torch.zeros(3, 3).T):
        for i in range(5):
            if group.rank == 0:
                buffer[...] = i + 1
            group.broadcast(buffer)
            assert (to_numpy(buffer) == i + 1).all()


def case_torch_tensors_that_are_not_plain(make: Make) -> None:
    group = make()
    leaf = torch.full((3,), 2.0, requires_grad=True)
    group.all_reduce(leaf)
    assert leaf.detach().tolist() == [2.0 * group.size] * 3
    assert leaf.requires_grad
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    group.all_reduce(conjugate)
    assert torch.equal(conjugate, torch.tensor([1 - 2j, 3 + 1j]) * group.size)
    with pytest.raises(UnsupportedError, match="meta"):
        group.all_reduce(torch.zeros(2, device="meta"))
    with pytest.raises(UnsupportedError, match="sparse"):
        group.all_reduce(torch.zeros(2).to_sparse())


# Parts --------------------------------------------------------------------------------------------------------------


def case_parts_may_differ_and_be_empty(make: Make) -> None:
    group = make(segment_bytes=8)
    size = group.size
    for lengths in ([0] * size, [3 * (r % 2) for r in range(size)], list(range(size)), [5] * size):
        parts = [np.arange(n) + 10 * r for r, n in enumerate(lengths)]
        np.testing.assert_array_equal(group.all_gather(parts[group.rank]), np.concatenate(parts))
        bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        flat = torch.full((bounds[-1],), -1)
        flat[bounds[group.rank] : bounds[group.rank + 1]] = torch.from_numpy(parts[group.rank])
        group.all_gather_into(flat, bounds)
        assert flat.tolist() == np.concatenate(parts).tolist()
    with pytest.raises(ValueError, match="offsets"):
        group.all_gather_into(torch.zeros(4), [0, 3])
    if group.size > 1:
        kinds = (np.float32, np.float64)
        with pytest.raises(UnsupportedError, match="one dtype"):
            group.all_gather(np.zeros(2, kinds[group.rank % 2]))


# Works --------------------------------------------------------------------------------------------------------------


def case_many_works_at_once(make: Make) -> None:
    count, num_buckets = 1003, 7
    for order in ("in order", "backwards", "each its own", "polled", "closed"):
        group = make(segment_bytes=64)
        data = inputs(group.size, count)
        expected = np.sum(np.float64(data), axis=0)
        flat = torch.from_numpy(data[group.rank].copy())
        works = []
        for start, stop in split.intervals(count, num_buckets):
            works.append(group.start_all_reduce(flat[start:stop]))
            group.advance()
        group.barrier()  # collectives may come between
        if order == "polled":
            while not all([work.done() for work in works]):
                group.advance()
        if order == "closed":
            group.close()
            assert all([work.done() for work in works])
        forwards = order == "in order" or (order == "each its own" and group.rank % 2)
        for work in works if forwards else works[::-1]:
            work.wait()
            assert work.done()
        np.testing.assert_allclose(flat.numpy(), expected, rtol=1e-5, atol=1e-4)


def case_tags_may_run_over(make: Make) -> None:
    group = make()
    group._core.num_works = 1016 * 32 - 3
    value = np.ones(2)
    for _ in range(5):
        group.all_reduce(value)
        group.barrier()
    assert value.tolist() == [float(group.size) ** 5] * 2


# Agreement ----------------------------------------------------------------------------------------------------------
