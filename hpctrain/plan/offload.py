"""What leaves the device when states are offloaded: the data-flow graph of ZeRO-Offload (arXiv 2101.06840, section 3).

    p16 --2--> forward and backward --2--> g16 --2--> update --2--> p16       bytes per parameter and step
                                     p32, m32, v32 <--4+4--> update

Forward and backward stay on the device; every other node is placed there or on the host, and an edge whose ends lie
apart is a transfer in every step. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

__all__ = ["EDGES", "NODES", "device_bytes", "placements", "transferred_bytes"]

#: Node -> bytes per parameter that it holds. Forward and backward are "compute".
NODES: dict[str, int] = {"compute": 0, "update": 0, "p16": 2, "g16": 2, "p32": 4, "m32": 4, "v32": 4}

#: (from, to) -> bytes per parameter that flow in every step.
EDGES: dict[tuple[str, str], int] = {
    ("p16", "compute"): 2, ("compute", "g16"): 2, ("g16", "update"): 2, ("update", "p16"): 2,
    **{edge: 4 for state in ("p32", "m32", "v32") for edge in ((state, "update"), ("update", state))},
}


def placements() -> Iterator[frozenset[str]]:
    """Every set of nodes that can be on the host, the empty one included."""
    movable = [node for node in NODES if node != "compute"]
    return (frozenset(host) for size in range(len(movable) + 1) for host in combinations(movable, size))


def device_bytes(host: frozenset[str]) -> int:
    """Bytes per parameter that stay on the device when the nodes in `host` are on the host."""
    return sum(size for node, size in NODES.items() if node not in host)


def transferred_bytes(host: frozenset[str]) -> int:
    """Bytes per parameter that cross between device and host in every step, both ways together."""
    return sum(size for (source, target), size in EDGES.items() if (source in host) != (target in host))
