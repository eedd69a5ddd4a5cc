"""Collectives on memory that the ranks share: right for every part, operation and type, and never by accident."""

from __future__ import annotations

from typing import Any

import numpy as np
import parity
import pytest
import torch

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group, jobs, meeting, reductions, shared, way
from hpctrain.collectives.meeting import Told
from hpctrain.collectives.recorder import Recorder
from hpctrain.errors import MismatchError, UnsupportedError
from hpctrain.plan.split import bounds
from hpctrain.transport.threads import run_threads

SIZES = (1, 2, 5, 6, 7, 1000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny arrays go the way of large ones, in several blocks."""
    monkeypatch.setattr(way, "SHARED_BYTES", 0)
    monkeypatch.setattr(shared, "BLOCK_BYTES", 64)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that carried out a plan, once for each time."""
    taken: list[int] = []
    execution = jobs._execution

    def watched(core: Any, *rest: Any) -> Any:
        taken.append(core.rank)
        return execution(core, *rest)

    monkeypatch.setattr(jobs, "_execution", watched)
    return taken


def values(count: int, rank: int, dtype: str) -> np.ndarray:
    return ((np.arange(count) % 7 + 1) * (rank + 1)).astype(np.float32 if dtype == "bfloat16" else dtype)


def allocate(g: Group, like: Any, count: int, dtype: str) -> Any:
    arrays = arrays_of(like)
    num_bytes = arrays.memory(arrays.empty(1, dtype)).nbytes
    return arrays.from_memory(g.transport.allocate(count * num_bytes), dtype)


def fill(like: Any, array: Any, content: np.ndarray) -> None:
    source = torch.from_numpy(content.copy()) if isinstance(like, torch.Tensor) else content
    arrays_of(like).assign(array, source)


def numbers(array: Any) -> list[float]:
    return [float(v) for v in array]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
@pytest.mark.parametrize("like", [np.empty(0), torch.empty(0)], ids=["numpy", "torch"])
def test_every_collective_on_shared_memory(num_ranks: int, dtype: str, like: Any, far: list[int]) -> None:
    reductions = {"sum": np.sum, "min": np.min, "max": np.max} | ({} if dtype == "int64" else {"mean": np.mean})

    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        for count in SIZES:
            x = allocate(g, like, count, dtype)
            everybody = np.stack([values(count, r, dtype) for r in range(num_ranks)])
            borders = bounds(count, num_ranks)
            own = slice(borders[g.rank], borders[g.rank + 1])
            for name, function in reductions.items():
                expected = function(everybody.astype(np.float64), axis=0)
                close = {"rel": 4e-3 if dtype == "bfloat16" else 1e-6}
                fill(like, x, everybody[g.rank])
                g.all_reduce(x, name)
                assert numbers(x) == pytest.approx(expected.tolist(), **close)
                fill(like, x, everybody[g.rank])
                assert numbers(g.reduce_scatter(x, name)) == pytest.approx(expected[own].tolist(), **close)
                assert numbers(x) == everybody[g.rank].tolist(), "the input was changed"
                for root in range(num_ranks):
                    fill(like, x, everybody[g.rank])
                    assert (g.reduce(x, name, root) is None) == (g.rank != root)
                    mine = expected if g.rank == root else everybody[g.rank]
                    assert numbers(x) == pytest.approx(mine.tolist(), **close)
            fill(like, x, everybody[g.rank])
            g.all_gather_into(x, borders)
            for r in range(num_ranks):
                part = slice(borders[r], borders[r + 1])
                assert numbers(x[part]) == everybody[r][part].tolist()

    run_threads(num_ranks, run)
    assert num_ranks == 1 or far == []


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_movement_on_shared_memory(num_ranks: int, blocking: bool, far: list[int]) -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)

        def do(name: str, *arguments: Any, **options: Any) -> Any:
            if blocking:
                return getattr(g, name)(*arguments, **options)
            return getattr(g, f"start_{name}")(*arguments, **options).wait()

        for count in (40, 0, 1, 3):  # something is shared when the empty ones come
            x, whole, other = (allocate(g, np.empty(0), n, "float32") for n in (count, *[count * num_ranks] * 2))
            mine = [values(count, r, "float32") for r in range(num_ranks)]
            everything = np.concatenate(mine)
            even = [count] * num_ranks
            for root in range(num_ranks):
                here = g.rank == root
                x[:] = mine[g.rank]
                do("broadcast", x, root)
                assert numbers(x) == mine[root].tolist()
                whole[:] = everything if here else -1
                out = np.zeros(count, np.float32)  # need not be shared: the root's array is
                do("scatter", out, whole if here else None, root)
                assert numbers(out) == mine[g.rank].tolist()
                result = do("gather", out, root, counts=even, out=other if here else None)
                assert (result is None) != here and (result is None or numbers(result) == everything.tolist())
            x[:] = mine[g.rank]
            assert numbers(do("all_gather", x, counts=even)) == everything.tolist()  # the result need not be shared
            other[:] = 0
            assert numbers(do("all_gather", mine[g.rank], counts=even, out=other)) == everything.tolist()
            do("all_to_all", whole_of(whole, everything), out=other)
            assert numbers(other) == mine[g.rank].tolist() * num_ranks
            counts = [[(source + 2 * target) % 3 for target in range(num_ranks)] for source in range(num_ranks)]
            sent = allocate(g, np.empty(0), 3 * num_ranks, "int32")[: sum(counts[g.rank])]
            sent[:] = np.repeat(100 * g.rank + np.arange(num_ranks), counts[g.rank])
            expected = [100 * r + g.rank for r in range(num_ranks) for _ in range(counts[r][g.rank])]
            assert numbers(do("all_to_all", sent, counts=counts)) == expected

    run_threads(num_ranks, run)
    assert far == []


def whole_of(array: Any, content: np.ndarray) -> Any:
    array[:] = content
    return array


@pytest.mark.parametrize("nodes", [(4, 2), (6, 2), (6, 3), (3, 1), (5, 2)])
@pytest.mark.parametrize("blocking", [True, False])
def test_an_all_reduce_over_several_nodes(nodes: tuple[int, int], blocking: bool, far: list[int]) -> None:
    """Ranks reduce inside their node, parts travel between nodes, and are rounded once."""
    num_ranks, per_node = nodes
    terms = [2048, 1, 1, 2, 1, 1][:num_ranks]  # in float16, 2048 + 1 is 2048

    def run(transport: Any) -> list[float]:
        g = Group(transport, arrays_of)
        for count in (1, 7, 100):
            for dtype, operation in (("float64", "sum"), ("float32", "mean"), ("int32", "max")):
                x = allocate(g, np.empty(0), count, dtype)
                x[:] = values(count, g.rank, dtype)
                works = [x] if blocking else [x[: count // 2], x[count // 2 :]]
                started = [g.start_all_reduce(part, operation) for part in works] if not blocking else []
                for work in started:
                    work.wait()
                if blocking:
                    g.all_reduce(x, operation)
                everybody = np.stack([values(count, r, dtype) for r in range(num_ranks)])
                expected = {"sum": np.sum, "mean": np.mean, "max": np.max}[operation](everybody, axis=0)
                assert numbers(x) == pytest.approx(expected.tolist(), rel=1e-6)
        half = allocate(g, torch.empty(0), 50, "float16")
        half.fill_(terms[g.rank])
        return numbers(g.all_reduce(half))

    exact = float(np.float16(sum(terms)))
    assert run_threads(num_ranks, run, ranks_per_node=per_node) == [[exact] * 50] * num_ranks
    if num_ranks % per_node or per_node == 1:
        assert far, "nodes of different sizes, or of one rank, have nothing to share"


def test_views_at_different_places_are_found(far: list[int]) -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        whole = allocate(g, np.empty(0), 100, "float32")
        whole[:] = 5
        view = whole[10 * g.rank : 10 * g.rank + 20]
        view[:] = g.rank + 1
        g.barrier()
        g.all_reduce(view)
        assert numbers(view) == [6.0] * 20
        rest = np.delete(whole, np.s_[10 * g.rank : 10 * g.rank + 20])
        assert numbers(rest) == [5.0] * 80, "memory outside the view was changed"

    run_threads(3, run)
    assert far == []


def test_shared_memory_by_name_is_refused_where_it_is_not(far: list[int]) -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        with pytest.raises(UnsupportedError, match="'shared memory' is not available"):
            g.all_reduce(np.ones(3), algorithm="shared memory")
        x = allocate(g, np.empty(0), 3, "float32")
        x[:] = 1
        assert numbers(g.all_reduce(x, algorithm="shared memory")) == [3.0] * 3
        with pytest.raises(UnsupportedError, match="transport.allocate"):
            g.all_reduce(x if g.rank else np.ones(3, np.float32), algorithm="shared memory")
        with pytest.raises(UnsupportedError, match="'native' is not available"):
            g.all_reduce(x, algorithm="native")

    run_threads(3, run)
    assert far == []


def test_a_rank_whose_call_was_refused_waits_no_longer() -> None:
    def run(transport: Any) -> None:
        channel = Recorder().channel("world", range(transport.size))
        g = Group(transport, arrays_of, observer=channel)
        x = allocate(g, np.empty(0), 3, "float32")
        with pytest.raises(UnsupportedError, match="transport.allocate"):
            g.all_reduce(x if g.rank else np.ones(3, np.float32), algorithm="shared memory")
        assert channel.current is None and channel.latest.state == "finished"

    run_threads(2, run)


def test_ranks_in_different_calls_learn_it_before_data_moves() -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        x = allocate(g, np.empty(0), 100, "float32")
        x[:] = g.rank
        job = reductions.all_reduce(g._core, x[: 100 - g.rank // 2], "sum", None, None, "")
        with pytest.raises(MismatchError, match="rank.*: in other collective calls than this rank, which is in"):
            for request in jobs._near_or_far(g._core, job, way.Way("ring", near=True), 7):
                request.wait()
        assert numbers(x) == [g.rank] * 100

    run_threads(3, run)


def test_one_rank_with_an_array_of_its_own_sends_all_by_messages(far: list[int]) -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        x = allocate(g, np.empty(0), 50, "float32")
        mine = np.empty(50, np.float32) if g.rank == 1 else x
        mine[:] = g.rank
        g.all_reduce(mine)
        assert numbers(mine) == [3.0] * 50

    run_threads(3, run)
    assert sorted(far) == [0, 1, 2]


def test_several_works_at_once_and_buckets_of_one_buffer() -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        x = allocate(g, np.empty(0), 1000, "float32")
        x[:] = values(1000, g.rank, "float32")
        works = [g.start_all_reduce(x[a : a + 130]) for a in range(0, 1000, 130)]
        while not all(work.done() for work in reversed(works)):
            g.advance()
        assert numbers(x) == (6 * values(1000, 0, "float32")).tolist()

    run_threads(3, run)


def test_half_sums_are_rounded_once_and_alike() -> None:
    for dtype, terms, total in (("float16", [2048, 1, 1, 2], 2052.0), ("bfloat16", [256, 1, 1, 2], 260.0)):
        for turn in range(4):
            def run(transport: Any, dtype: str = dtype, terms: list[int] = terms, turn: int = turn) -> list[float]:
                g = Group(transport, arrays_of)
                x = allocate(g, torch.empty(0), 333, dtype)
                x.fill_(terms[(g.rank + turn) % 4])
                return numbers(g.all_reduce(x))

            assert run_threads(4, run) == [[total] * 333] * 4


def test_a_meeting_tells_all_ranks_alike() -> None:
    def run(transport: Any) -> list[Told]:
        steps = meeting.by_messages(transport, 7, Told(transport.rank, -1, 2**62 + transport.rank))
        while True:
            try:
                next(steps).wait()
            except StopIteration as end:
                return end.value

    for size in range(1, 10):
        assert run_threads(size, run) == [[(r, -1, 2**62 + r) for r in range(size)]] * size


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_training_on_shared_buffers_equals_one_process(num_ranks: int, far: list[int]) -> None:
    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        parity.torch_case(context, "adamw", torch.float64, 2, 0.5)
        parity.numpy_case(context, "sgd", "float32", 1, None)

    run_threads(num_ranks, run)
    assert len(far) <= 2 * num_ranks * 5 * 2  # only the few numbers of each step (loss, weight, norm) are sent
