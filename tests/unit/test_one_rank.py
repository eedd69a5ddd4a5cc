"""A group of one rank costs nothing measurable: no message, no pass over the array, few microseconds."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.choose import Chooser
from hpctrain.transport.threads import single

COUNT = 16 << 20  # elements: 64 MiB, whose copy takes milliseconds
MICROSECONDS = 200.0  # for a call at its best; a tenth of that is ordinary

CALLS = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "all_reduce mean": lambda g, x: g.all_reduce(x, "mean"),
    "all_reduce, out is the array": lambda g, x: g.all_reduce(x, out=x),
    "reduce": lambda g, x: g.reduce(x),
    "reduce_scatter in place": lambda g, x: g.reduce_scatter(x, out=x),
    "broadcast": lambda g, x: g.broadcast(x),
    "all_gather_into": lambda g, x: g.all_gather_into(x, [0, len(x)]),
    "all_to_all in place": lambda g, x: g.all_to_all(x, out=x),
    "start_all_reduce": lambda g, x: g.start_all_reduce(x).wait(),
    "barrier": lambda g, x: g.barrier(),
    "exchange": lambda g, x: g.exchange(1),
    "on_root": lambda g, x: g.on_root(lambda: 1),
}


@pytest.fixture(scope="module")
def group() -> Group:
    transport = single()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a rank that is alone sends nothing")

    transport.send = transport.recv = refuse
    return Group(transport, arrays_of, chooser=Chooser())


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_large_arrays_are_not_touched(group: Group, call: str, kind: Any) -> None:
    array = np.empty(COUNT, kind)  # its pages are not even there
    function, best = CALLS[call], float("inf")
    for _ in range(20):
        start = time.perf_counter()
        function(group, array)
        best = min(best, time.perf_counter() - start)
    assert 1e6 * best < MICROSECONDS, f"{1e6 * best:.0f} us"
