"""Every primitive cut at any limit, half sums by every algorithm, odd layouts in large memory.

As functions of a factory of groups (`collective_cases`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group, agreement
from hpctrain.collectives.choose import ways
from hpctrain.errors import UnsupportedError
from tests.collective_cases import Make, as_library, inputs, to_numpy

SIZES = (0, 1, 6, 7, 8, 1000, 1001)
SEVEN = 28  # bytes: seven elements of float32
LIMITS: tuple[dict[str, int], ...] = (
    {}, {"segment_bytes": SEVEN}, {"segment_bytes": SEVEN, "message_limit": SEVEN}, {"message_limit": 12},
)


def case_every_primitive_gives_the_same_bits_at_any_limit(make: Make) -> None:
    groups = [make(**limit) for limit in LIMITS]
    for count in SIZES:
        told = {results_of(group, count) for group in groups}
        assert len(told) == 1, f"{count} elements: the limit changes the bits"


def results_of(group: Group, count: int) -> bytes:
    """Each primitive once, on parts of equal and of different length; gives all bits, after comparing each result."""
    p, rank = group.size, group.rank
    data = inputs(p, count)
    mine, total = data[rank], np.sum(np.float64(data), axis=0)
    lengths = [(count * (r + 1)) // (p * (p + 1) // 2) for r in range(p)]  # different ones
    lengths[-1] += count - sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    own, root, bits = slice(offsets[rank], offsets[rank + 1]), count % p, []

    def compare(result: np.ndarray | None, expected: np.ndarray, *, exact: bool = True) -> None:
        if result is not None:
            np.testing.assert_allclose(result, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-4)
            bits.append(result.tobytes())

    compare(group.all_reduce(mine.copy()), total, exact=False)
    compare(group.reduce(mine.copy(), root=root), total, exact=False)
    compare(group.reduce_scatter(mine, counts=lengths), total[own], exact=False)
    compare(group.broadcast(mine.copy(), root), data[root])
    compare(group.scatter(np.empty(lengths[rank], np.float32), mine, root, counts=lengths), data[root][own])
    parts = [data[r][offsets[r] : offsets[r + 1]] for r in range(p)]
    compare(group.gather(parts[rank], root, counts=lengths), np.concatenate(parts))
    compare(group.all_gather(parts[rank], counts=lengths), np.concatenate(parts))
    compare(group.all_to_all(np.concatenate(data)), np.concatenate([mine] * p))
    rows = [lengths[s:] + lengths[:s] for s in range(p)]  # from rank s to each rank: another order for each
    starts = [np.concatenate([[0], np.cumsum(row)]) for row in rows]
    came = [data[s][starts[s][rank] : starts[s][rank + 1]] for s in range(p)]
    compare(group.all_to_all(mine, counts=rows), np.concatenate(came))
    if p > 1:
        work = group.start_send(mine, (rank + 1) % p)
        compare(group.recv(np.empty(count, np.float32), (rank - 1) % p), data[rank - 1])
        work.wait()
    return b"|".join(bits)


def case_half_sums_by_every_algorithm(make: Make) -> None:
    group = make(segment_bytes=20, node_size=2)
    p = group.size
    for dtype, values in (("float16", [2048.0, 1.0, 1.0, 2.0]), ("bfloat16", [256.0, 1.0, 1.0, 2.0])):
        kind = inputs(1, 1, dtype)[0].dtype
        memory = group.transport.allocate((5 * p + 3) * 2)
        memories = np.empty(5 * p + 3, kind), np.frombuffer(memory, kind)
        for turn in range(4):
            shares = [values[(r + turn) % 4] if r < 4 else 0.0 for r in range(p)]  # 2052 and 260 from four ranks on
            total = float(np.float32(sum(shares)).astype(kind))
            for array in memories:
                for operation in ("all_reduce", "reduce", "reduce_scatter"):
                    for algorithm in (None, *ways(operation)):
                        array[:] = shares[group.rank]
                        result = offered(getattr(group, operation), array, algorithm)
                        if result is not None:
                            assert (result.astype(np.float64) == total).all(), (operation, algorithm, dtype, turn)


def offered(call: Callable[..., Any], array: Any, algorithm: str | None) -> Any:
    """The result, or None from a way that this transport, or this memory, does not have; all ranks are told alike."""
    try:
        return call(array, algorithm=algorithm)
    except UnsupportedError:
        assert algorithm in ("native", "shared memory", "two-level"), algorithm
        return None


LARGE: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda parent: parent[: 1 << 15].reshape(128, 256).T,
    "every second column": lambda parent: parent[: 1 << 15].reshape(128, 256)[:, ::2],
    "storage offset": lambda parent: parent[5 : (1 << 15) - 7],
    "shape 1xnx2": lambda parent: parent[4 : (1 << 15) + 4].reshape(1, -1, 2),
    "no elements": lambda parent: parent[3:3],
    "one element, stride 2": lambda parent: parent[6::2][:1],
}


def case_views_of_any_layout_in_memory_from_the_transport(make: Make) -> None:
    group = make()
    p, rank = group.size, group.rank
    fresh = [(np.arange((1 << 15) + 10) % 1000).astype(np.float32) + 1000 * r for r in range(p)]
    for library in ("numpy", "torch"):
        like = as_library(np.empty(0), library)
        memory = arrays_of(like).from_memory(group.transport.allocate(fresh[0].nbytes), "float32")
        for name, view_of in LARGE.items():
            logical = [view_of(each) for each in fresh]
            calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
                "broadcast": (lambda view: group.broadcast(view, p - 1), logical[-1]),
                "all_reduce": (group.all_reduce, np.sum(logical, axis=0)),
                "all_to_all": (lambda view: to_left(group, view), logical[(rank + 1) % p]),
            }
            if p > 1:
                calls["send and recv"] = (lambda view: pass_on(group, view), logical[max(rank - 1, 0)])
            for call, (function, result) in calls.items():
                to_numpy(memory)[:] = fresh[rank]
                right = fresh[rank].copy()
                view_of(right)[...] = result
                function(view_of(memory))
                np.testing.assert_array_equal(to_numpy(memory), right, err_msg=f"{call}, {name}")  # outside, too
            to_numpy(memory)[:] = fresh[rank]
            gathered = group.all_gather(view_of(memory))
            np.testing.assert_array_equal(to_numpy(gathered), np.concatenate([each.reshape(-1) for each in logical]))


def to_left(group: Group, view: Any) -> None:
    """Each rank's view to the rank before it, in place."""
    p, count = group.size, int(np.prod(view.shape))
    group.all_to_all(view, counts=[[count * (d == (s - 1) % p) for d in range(p)] for s in range(p)], out=view)


def pass_on(group: Group, view: Any) -> None:
    """Rank r ends with what rank r - 1 had."""
    if group.rank < group.size - 1:
        work = group.start_send(view, group.rank + 1)
        work.wait() if group.rank == 0 else None
    if group.rank > 0:
        got = np.empty(view.shape, np.float32)
        group.recv(got, group.rank - 1)
        if group.rank < group.size - 1:
            work.wait()
        to_numpy(view)[...] = got


def case_values_that_are_too_large_are_refused_on_all_ranks(make: Make) -> None:
    group = make()
    before = agreement.LIMIT
    group.barrier()  # ranks may be threads of one process: all have looked before one writes
    agreement.LIMIT = 1000
    try:
        group.barrier()
        for call in (lambda: group.exchange("x" * (2000 if group.rank == 0 else 1)),
                     lambda: group.broadcast_value("x" * 2000),
                     lambda: group.on_root(lambda: "x" * 2000)):
            with pytest.raises(ValueError, match="rank 0: a value of 2012 bytes as text is too long; at most 1000"):
                call()
        group.barrier()
    finally:
        agreement.LIMIT = before
