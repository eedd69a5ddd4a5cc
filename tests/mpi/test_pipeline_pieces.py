"""Scatter/gather between tensor-parallel stages over MPI; run with 1 to 4 ranks."""

from __future__ import annotations

import pytest
import tensor_stages as ts

import hpctrain


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_split_stages_equal_one_process(name: str) -> None:
    """Every tensor group that divides the ranks; its last rank may own nothing."""
    context = hpctrain.start()
    for tensor in (t for t in range(1, context.size + 1) if context.size % t == 0):
        for hidden in (2, 4):
            ts.case(context, tensor, name, (3, 3, 3, 2, 0, 4, 4), hidden=hidden, least_bytes=0, checked=hidden == 2)


def test_larger_pieces() -> None:
    """Large enough for MPI to wait for the receiver, and to be cut by default."""
    context = hpctrain.start()
    ts.case(context, 2 if context.size % 2 == 0 else 1, "1f1b", (5000, 5001, 5001, 7), split=False)
