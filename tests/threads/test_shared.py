"""Collectives on memory that the ranks share: right for every part, operation and type, and never by accident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import parity
import pytest
import torch

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group, core, shared
from hpctrain.plan.split import bounds
from hpctrain.transport.threads import run_threads

SIZES = (1, 2, 5, 6, 7, 1000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny arrays go the way of large ones, in several blocks."""
    monkeypatch.setattr(core, "SHARED_BYTES", 0)
    monkeypatch.setattr(shared, "BLOCK_BYTES", 64)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often the way of messages is taken."""
    taken: list[int] = []
    run = shared.together

    def watched(transport: Any, tag: int, place: Any, near: Any, messages: Any) -> Any:
        def noted() -> Iterator[Any]:
            taken.append(transport.rank)
            yield from messages()

        return run(transport, tag, place, near, noted)

    monkeypatch.setattr(core, "together", watched)
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
            fill(like, x, everybody[g.rank])
            g.all_gather_into(x, borders)
            for r in range(num_ranks):
                part = slice(borders[r], borders[r + 1])
                assert numbers(x[part]) == everybody[r][part].tolist()

    run_threads(num_ranks, run)
    assert far == []


def test_ranks_with_views_at_different_places_go_by_messages(far: list[int]) -> None:
    def run(transport: Any) -> None:
        g = Group(transport, arrays_of)
        whole = allocate(g, np.empty(0), 100, "float32")
        whole[:] = 5
        view = whole[10 * g.rank : 10 * g.rank + 20]
        view[:] = g.rank + 1
        g.all_reduce(view)
        assert numbers(view) == [6.0] * 20
        rest = np.delete(whole, np.s_[10 * g.rank : 10 * g.rank + 20])
        assert numbers(rest) == [5.0] * 80, "memory outside the view was changed"

    run_threads(3, run)
    assert sorted(far) == [0, 1, 2]


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


def test_a_meeting_tells_all_ranks_alike_whether_places_differ() -> None:
    def verdicts(places: list[tuple[int, int]]) -> list[bool]:
        def run(transport: Any) -> bool:
            steps = shared.meet(transport, 7, places[transport.rank])
            while True:
                try:
                    next(steps).wait()
                except StopIteration as end:
                    return end.value

        return run_threads(len(places), run)

    for size in range(1, 9):
        assert verdicts([(1, 64)] * size) == [True] * size
        assert verdicts([(-1, -1)] * size) == [False] * size
        for odd in range(size if size > 1 else 0):
            for other in ((1, 0), (2, 64), (-1, -1)):
                places = [other if rank == odd else (1, 64) for rank in range(size)]
                assert verdicts(places) == [False] * size, (size, odd)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_training_on_shared_buffers_equals_one_process(num_ranks: int, far: list[int]) -> None:
    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        parity.torch_case(context, "adamw", torch.float64, 2, 0.5)
        parity.numpy_case(context, "sgd", "float32", 1, None)

    run_threads(num_ranks, run)
    assert len(far) <= 2 * num_ranks * 5 * 2  # only the few numbers of each step (loss, weight, norm) are sent
