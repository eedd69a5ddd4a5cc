"""Parameters that exist once per node, on several nodes: what an owner stored on its node reaches the others.

    node 0   |A0|B0|A1|B1|   ranks 0 (A) and 1 (B) own parts 0, ranks 2 (A) and 3 (B) parts 1
    node 1   |A0|B0|A1|B1|   A0 and A1 pass between ranks 0 and 2, B0 and B1 between ranks 1 and 3

Each rank exchanges with the ranks at its place of the other nodes, and stores what comes in its own node. Owns this
exchange. Knows regions and groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.collectives import Group
from hpctrain.contracts import Arrays
from hpctrain.zero.held import Held
from hpctrain.zero.regions import Region

__all__ = ["NodeExchange"]


class NodeExchange:
    """Between the nodes of `group`, numbered node by node, with equally many ranks on each. Collective to make."""

    def __init__(self, group: Group, arrays: Arrays, regions: Iterable[Region]) -> None:
        near = group.transport.node_ranks()
        self._ranks = range(near.index(group.rank), group.size, len(near))
        self._rank, self._arrays = group.rank, arrays
        peers = group.subgroup(self._ranks)
        assert peers is not None, "this rank is one of them"
        self._peers = peers
        sizes: dict[str, int] = {}
        for region in regions:
            for number in range(len(region.shards.buckets)):
                dtype = region.layout.dtype
                sizes[dtype] = max(sizes.get(dtype, 0), sum(self._counts(region, number)))
        self._scratch = {dtype: arrays.zeros(count, dtype) for dtype, count in sizes.items()}

    def _counts(self, region: Region, number: int) -> list[int]:
        return [region.shards.counts(number)[rank] for rank in self._ranks]

    def run(self, region: Region, held: Held) -> None:
        """Completes a region in this node's memory, of which this rank has stored its part. Collective."""
        for number in range(len(region.shards.buckets)):
            counts = self._counts(region, number)
            target = self._scratch[region.layout.dtype][: sum(counts)]
            own = held.piece(*region.shards.part(number, self._rank))
            self._peers.all_gather(own, counts=counts, out=target, name=f"parameters {number} between nodes")
            offset = 0
            for rank, count in zip(self._ranks, counts, strict=True):
                if rank != self._rank:
                    self._arrays.assign(held.piece(*region.shards.part(number, rank)), target[offset : offset + count])
                offset += count
