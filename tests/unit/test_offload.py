"""ZeRO-Offload's Table 1 and its claim that no placement moves less than 4 bytes a parameter (arXiv 2101.06840)."""

from __future__ import annotations

import pytest

from hpctrain.plan.offload import EDGES, NODES, device_bytes, placements, transferred_bytes

STATES = {"update", "p32", "m32", "v32"}


@pytest.mark.parametrize("host, on_device", [(set(), 16), ({"g16"}, 14), (STATES, 4), (STATES | {"g16"}, 2)])
def test_table_1(host: set[str], on_device: int) -> None:
    assert device_bytes(frozenset(host)) == on_device
    assert transferred_bytes(frozenset(host)) == (4 if host else 0)


def test_no_placement_that_takes_anything_off_the_device_moves_less_than_4() -> None:
    moved = {host: transferred_bytes(host) for host in placements() if device_bytes(host) < 16}
    assert len(moved) == 2**6 - 2
    assert min(moved.values()) == 4
    cheapest = [host for host, size in moved.items() if size == 4]
    assert min(device_bytes(host) for host in cheapest) == 0
    best = min((h for h in cheapest if "p16" not in h), key=device_bytes)
    assert best == STATES | {"g16"}


def test_every_edge_joins_nodes() -> None:
    assert {node for edge in EDGES for node in edge} == set(NODES)
