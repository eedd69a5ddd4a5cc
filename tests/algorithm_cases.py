"""Every algorithm of every primitive, as cases like those of `collective_cases`: run on threads and over MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.errors import UnsupportedError
from hpctrain.plan import split
from hpctrain.plan.algorithms import ALGORITHMS
from tests.collective_cases import LAYOUTS, Make, as_library, assert_close, reduced, small_numbers, to_numpy

SIZES = (0, 1, 5, 257)
DTYPES = ("float32", "bfloat16", "int64", "complex64")


def settings() -> Iterator[tuple[str, str, int]]:
    """(library, dtype, count), each dtype and count with either library."""
    for library in ("numpy", "torch"):
        for dtype in DTYPES:
            for count in SIZES:
                yield library, dtype, count


def digest(array: Any) -> str:
    return to_numpy(array).tobytes().hex()


def case_all_reduce(make: Make) -> None:
    for algorithm in ALGORITHMS["all_reduce"]:
        group = make(segment_bytes=300, node_size=2)
        told = []
        for library, dtype, count in settings():
            data = small_numbers(group.size, count, dtype)
            for operation in ("sum", "prod", "logical_xor"):
                expected = reduced(operation, data, dtype)
                array = as_library(data[group.rank], library)
                out = as_library(np.zeros_like(expected), library)
                assert group.all_reduce(array, operation, out=out, algorithm=algorithm) is out
                np.testing.assert_array_equal(to_numpy(array), data[group.rank])
                assert group.all_reduce(array, operation, algorithm=algorithm) is array
                for result in (array, out):
                    assert_close(result, expected, dtype)
                    told.append(digest(result))
        assert len({tuple(each) for each in group.exchange(told)}) == 1, f"{algorithm}: bits differ between ranks"


def case_reduce(make: Make) -> None:
    group = make(segment_bytes=300)
    for algorithm in ALGORITHMS["reduce"]:
        for library, dtype, count in settings():
            data = small_numbers(group.size, count, dtype)
            expected = reduced("sum", data, dtype)
            root = count % group.size
            array = as_library(data[group.rank], library)
            out = as_library(np.zeros_like(expected), library)
            result = group.reduce(array, "sum", root, out=out, algorithm=algorithm)
            np.testing.assert_array_equal(to_numpy(array), data[group.rank])
            result_in_place = group.reduce(array, "sum", root, algorithm=algorithm)
            if group.rank == root:
                assert result is out
                assert result_in_place is array
                assert_close(out, expected, dtype)
                assert_close(array, expected, dtype)
            else:
                assert result is None
                assert result_in_place is None
                np.testing.assert_array_equal(to_numpy(array), data[group.rank])


def case_reduce_scatter(make: Make) -> None:
    group = make(segment_bytes=300)
    for algorithm in ALGORITHMS["reduce_scatter"]:
        for library, dtype, count in settings():
            data = small_numbers(group.size, count, dtype)
            expected = reduced("sum", data, dtype)
            everything_to_last = [0] * (group.size - 1) + [count]
            for counts in (None, everything_to_last):
                start, stop = split.part(count, group.size, group.rank)
                if counts is not None:
                    start, stop = sum(counts[: group.rank]), sum(counts[: group.rank + 1])
                array = as_library(data[group.rank], library)
                result = group.reduce_scatter(array, counts=counts, algorithm=algorithm)
                np.testing.assert_array_equal(to_numpy(array), data[group.rank])
                assert_close(result, expected[start:stop], dtype)
                own = array[start:stop]  # in place
                assert group.reduce_scatter(array, counts=counts, out=own, algorithm=algorithm) is own
                assert_close(own, expected[start:stop], dtype)


def lengths_of(size: int, count: int) -> list[int]:
    """Different lengths, some 0, one a rank."""
    return [(count * (rank + 2)) % 7 for rank in range(size)]


def case_parts_to_and_from_the_root_and_to_all(make: Make) -> None:
    group = make(segment_bytes=40)
    for library, dtype, count in settings():
        root = count % group.size
        for lengths in (lengths_of(group.size, count), [count] * group.size):
            even = len(set(lengths)) == 1
            parts = [part[:length] for part, length in zip(small_numbers(group.size, 257, dtype), lengths)]
            whole, mine = np.concatenate(parts), parts[group.rank]
            counts = None if even else lengths
            for algorithm in ALGORITHMS["scatter"]:
                out = as_library(np.zeros_like(mine), library)
                array = as_library(whole, library) if group.rank == root else None
                assert group.scatter(out, array, root, counts=counts, algorithm=algorithm) is out
                np.testing.assert_array_equal(to_numpy(out), mine)
            for algorithm in ALGORITHMS["gather"]:
                for told in (lengths, None):
                    result = group.gather(as_library(mine, library), root, counts=told, algorithm=algorithm)
                    assert (result is None) == (group.rank != root)
                    if result is not None:
                        np.testing.assert_array_equal(to_numpy(result), whole)
            for algorithm in ALGORITHMS["all_gather"]:
                out = as_library(np.zeros_like(whole), library)
                part = as_library(mine, library)
                assert group.all_gather(part, counts=lengths, out=out, algorithm=algorithm) is out
                np.testing.assert_array_equal(to_numpy(out), whole)
                np.testing.assert_array_equal(to_numpy(group.all_gather(part, algorithm=algorithm)), whole)


def case_broadcast(make: Make) -> None:
    group = make(segment_bytes=100)
    for algorithm in ALGORITHMS["broadcast"]:
        for library, dtype, count in settings():
            data = small_numbers(group.size, count, dtype)
            for root in range(group.size):
                array = as_library(data[group.rank], library)
                assert group.broadcast(array, root, algorithm=algorithm) is array
                np.testing.assert_array_equal(to_numpy(array), data[root])


def case_all_to_all(make: Make) -> None:
    group = make(segment_bytes=40)
    p, rank = group.size, group.rank
    for algorithm in ALGORITHMS["all_to_all"]:
        for library, dtype, count in settings():
            uneven = [[(count + 3 * s + 5 * d) % 4 for d in range(p)] for s in range(p)]
            for counts in ([[count] * p] * p, uneven):
                offsets = [np.concatenate([[0], np.cumsum(row)]) for row in counts]
                data = [values[: offsets[s][-1]] for s, values in enumerate(small_numbers(p, 257 * p, dtype))]
                expected = np.concatenate([data[s][offsets[s][rank] : offsets[s][rank + 1]] for s in range(p)])
                asked = None if counts is not uneven else counts
                array = as_library(data[rank], library)
                out = as_library(np.zeros_like(expected), library)
                assert group.all_to_all(array, counts=asked, out=out, algorithm=algorithm) is out
                np.testing.assert_array_equal(to_numpy(out), expected)
                np.testing.assert_array_equal(to_numpy(array), data[rank])
                if asked is None:
                    assert group.all_to_all(array, out=array, algorithm=algorithm) is array
                    np.testing.assert_array_equal(to_numpy(array), expected)
    if p > 1:
        with pytest.raises(ValueError, match="equal blocks"):
            group.all_to_all(np.zeros(p + 1))


def case_works_of_all_kinds_at_once(make: Make) -> None:
    group = make(segment_bytes=50)
    p, rank = group.size, group.rank
    whole = np.arange(12.0 * p) + 1000 * rank
    everyone = [np.arange(12.0 * p) + 1000 * r for r in range(p)]
    for library in ("numpy", "torch"):
        arrays = [as_library(whole, library) for _ in range(6)]
        part = as_library(whole[:12], library)
        to_right = group.start_send(arrays[0], (rank + 1) % p) if p > 1 else None
        works = [
            group.start_all_reduce(arrays[1]),
            group.start_reduce(arrays[2], "max", p - 1),
            group.start_reduce_scatter(arrays[0]),
            group.start_broadcast(arrays[3], p - 1),
            group.start_barrier(),
            group.start_scatter(as_library(np.zeros(12), library), arrays[0], 0),
            group.start_gather(part, 0, counts=[12] * p),
            group.start_all_gather(part, counts=[12] * p),
            group.start_all_gather_into(arrays[4], split.bounds(12 * p, p)),
            group.start_all_to_all(arrays[0]),
            group.start_all_reduce(arrays[5], "mean", algorithm="recursive doubling"),
        ]
        from_left = group.start_recv(as_library(np.zeros(12 * p), library), (rank - 1) % p) if p > 1 else None
        group.advance()
        order = range(len(works)) if rank % 2 else reversed(range(len(works)))
        results = [None] * len(works)
        for i in order:
            results[i] = works[i].wait()
            assert works[i].done()
        own, total = slice(12 * rank, 12 * rank + 12), np.sum(everyone, axis=0)
        parts = np.concatenate([values[:12] for values in everyone])
        mine = np.concatenate([values[12 * r : 12 * r + 12] for r, values in enumerate(everyone)])
        expected = [total, everyone[-1] if rank == p - 1 else None, total[own], everyone[-1], None, everyone[0][own],
                    parts if rank == 0 else None, parts, mine, np.concatenate([v[own] for v in everyone]), total / p]
        for result, right in zip(results, expected, strict=True):
            if right is None:
                assert result is None
            else:
                np.testing.assert_allclose(to_numpy(result), right)
        if to_right is not None and from_left is not None:
            while not from_left.done():
                pass
            np.testing.assert_array_equal(to_numpy(from_left.wait()), everyone[(rank - 1) % p])
            to_right.wait()


def case_other_calls_while_works_are_under_way(make: Make) -> None:
    """One rank waits for the work first, the other goes on to the next call: it must move the work on from there."""
    group = make(segment_bytes=16)
    for talk in (lambda: group.exchange(1), group.barrier, lambda: group.on_root(lambda: 1)):
        work = group.start_all_reduce(np.ones(100))
        if group.rank % 2:
            work.wait()
        talk()
        assert work.wait().tolist() == [float(group.size)] * 100
    work = group.start_all_reduce(np.ones(100))
    if group.size > 1:
        if group.rank == 0:
            group.recv(np.zeros(2), 1)
        else:
            work.wait()
            if group.rank == 1:
                group.send(np.ones(2), 0)
    assert work.wait().tolist() == [float(group.size)] * 100
    if group.size > 1:  # to wait for one work is not to wait for those after it, which others may not have started
        first = group.start_all_reduce(np.ones(100))
        second = group.start_all_reduce(np.ones(100)) if group.rank == 0 else None
        first.wait()
        for other in range(1, group.size):
            if group.rank == 0:
                group.send(np.ones(2), other)
            elif group.rank == other:
                group.recv(np.zeros(2), 0)
        second = second or group.start_all_reduce(np.ones(100))
        assert second.wait().tolist() == [float(group.size)] * 100


def case_layouts(make: Make) -> None:
    group = make(segment_bytes=12)
    p, rank = group.size, group.rank
    for library in ("numpy", "torch"):
        for view_of in LAYOUTS.values():
            base = [np.arange(20, dtype=np.float32) + 100 * r for r in range(p)]
            logical = [view_of(b).reshape(-1) for b in base]
            count = len(logical[0])
            view = view_of(as_library(base[rank], library))

            def target(view_of: Callable[[Any], Any] = view_of, library: str = library) -> Any:
                return view_of(as_library(np.zeros(20, np.float32), library))

            out = group.all_reduce(view, out=target())
            np.testing.assert_array_equal(to_numpy(out).reshape(-1), np.sum(logical, axis=0))
            out = group.reduce(view, "max", p - 1, out=target())
            if rank == p - 1:
                np.testing.assert_array_equal(to_numpy(out).reshape(-1), logical[-1])
            out = group.scatter(target(), as_library(np.concatenate(logical), library), 0)
            np.testing.assert_array_equal(to_numpy(out).reshape(-1), logical[rank])
            whole = group.gather(view, 0)
            if rank == 0:
                np.testing.assert_array_equal(to_numpy(whole), np.concatenate(logical))
            counts = [[count if d == (s + 1) % p else 0 for d in range(p)] for s in range(p)]
            out = group.all_to_all(view, counts=counts, out=target())
            np.testing.assert_array_equal(to_numpy(out).reshape(-1), logical[(rank - 1) % p])
            np.testing.assert_array_equal(to_numpy(view).reshape(-1), logical[rank])  # an input all the time
            work = group.start_all_reduce(view)
            work.wait()
            np.testing.assert_array_equal(to_numpy(view).reshape(-1), np.sum(logical, axis=0))


class Told:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def started(self, operation: str, dtype: str = "", count: int = 0, name: str = "") -> int:
        self.events.append((operation, dtype, count, name))
        return len(self.events)

    def waiting(self, sequence: int) -> None:
        self.events.append(("waiting", sequence))

    def working(self, sequence: int) -> None:
        self.events.append(("working", sequence))

    def finished(self, sequence: int) -> None:
        self.events.append(("finished", sequence))

    def subgroup(self, ranks: Any, transport: Any) -> Told:
        return Told()

    def close(self) -> None:
        self.events.append(("closed",))


def case_the_observer_is_told(make: Make) -> None:
    told = Told()
    group = make(observer=told)
    work = group.start_all_reduce(np.zeros(3), "max", name="norms")
    assert told.events[0] == ("all_reduce max", "float64", 3, "norms")
    work.wait()
    assert told.events[-1] == ("finished", 1)
    assert (("waiting", 1) in told.events) or group.size == 1
    for call, title in (
        (lambda: group.reduce(np.zeros(3), root=0), ("reduce sum to 0", "float64", 3, "")),
        (lambda: group.broadcast(np.zeros(3, np.int8)), ("broadcast from 0", "int8", 3, "")),
        (lambda: group.all_to_all(np.zeros(2 * group.size)), ("all_to_all", "float64", 2 * group.size, "")),
        (group.barrier, ("barrier", "", 0, "")),
        (lambda: group.exchange(1), ("exchange", "", 0, "")),
        (lambda: group.on_root(lambda: 1), ("on_root 0", "", 0, "")),
    ):
        first = len(told.events)
        call()
        assert told.events[first] == title
        assert told.events[-1] == ("finished", first + 1)
    assert any(event[0] == "working" for event in told.events) == (group.rank == 0)
    with group.agree():
        before = len(told.events)
    assert told.events[before] == ("agree", "", 0, "")


class Picky:
    """A chooser that always takes the naive way, and notes what it was asked."""

    algorithm = "naive"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def choose(self, *question: Any) -> Picky:
        self.asked.append(question[:5])
        return self


def case_the_chooser_is_asked(make: Make) -> None:
    chooser = Picky()
    group = make(chooser=chooser, node_size=2)
    p = group.size
    nodes = -(-p // 2)
    assert group.all_reduce(np.ones(3), "mean").tolist() == [1.0] * 3
    group.all_reduce(np.ones(3), algorithm="ring")  # the caller knows better
    group.all_to_all(torch.zeros(2 * p, dtype=torch.int16))
    half = group.subgroup([r for r in range(p) if r % 2 == group.rank % 2])
    assert half is not None
    half.broadcast(np.zeros(5, np.int8))
    expected = [("all_reduce", 24, p, nodes, "float64"), ("all_to_all", 4 * p, p, nodes, "int16")]
    assert chooser.asked[:2] == expected
    assert chooser.asked[2][:3] == ("broadcast", 5, half.size)
    half.close()


def case_nodes_that_are_not_in_order(make: Make) -> None:
    group = make()
    group.transport.node_ranks = lambda: (group.rank,)  # every rank a node of its own
    group.all_reduce(np.ones(3), algorithm="two-level")
    group = make()
    if group.size == 4:
        group.transport.node_ranks = lambda: ((0, 2), (1, 3))[group.rank % 2]
        with pytest.raises(UnsupportedError, match="node by node"):
            group.all_reduce(np.ones(3), algorithm="two-level")
