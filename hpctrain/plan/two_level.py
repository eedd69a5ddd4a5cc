"""Two-level all-reduce: as little as possible between nodes, where links are slow.

Owns the plan: inside each node a ring reduce-scatter cuts the vector into shards, then the ranks that own the same
shard on different nodes all-reduce it in a ring, then a ring all-gather inside each node. With N nodes of g ranks each
sends 2 (g - 1) / g n inside its node and 2 (N - 1) / N n / g between nodes, in 2 (g - 1) + 2 (N - 1) rounds.

Node i has the ranks i * g .. (i + 1) * g - 1; the last node may have fewer, whose ranks then own several shards each:

    p = 5, g = 2     node 0: ranks 0 1     node 1: ranks 2 3     node 2: rank 4
                     shard         0 1                     0 1                  0, 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from hpctrain.errors import PlanError
from hpctrain.plan import split
from hpctrain.plan.ring import gather_rounds, reduce_rounds
from hpctrain.plan.steps import CollectivePlan, Step

__all__ = ["all_reduce"]


def all_reduce(bounds: Sequence[int], node_size: int) -> CollectivePlan:
    """`node_size` is the number of ranks of a node, g."""
    p, n = len(bounds) - 1, bounds[-1]
    if node_size < 1:
        raise PlanError(f"node_size = {node_size} must be at least 1")
    g = min(node_size, p)
    nodes = [range(first, min(first + g, p)) for first in range(0, p, g)]
    shards = split.bounds(n, g)

    def make(rank: int) -> Iterator[Step]:
        node, place = nodes[rank // g], rank % g
        owned = split.bounds(g, len(node))  # place -> its first shard
        inside = [shards[i] for i in owned]
        alone = len(nodes) == 1
        yield from reduce_rounds(inside, node, place, finish=alone)
        if not alone:
            across = [_across(nodes, shards, rank // g, shard) for shard in range(owned[place], owned[place + 1])]
            for steps in zip_longest(*across, fillvalue=()):
                yield tuple(action for step in steps for action in step)
        yield from gather_rounds(inside, node, place)

    return CollectivePlan("all_reduce", "two-level", p, bounds, make)


def _across(nodes: Sequence[range], shards: Sequence[int], node: int, shard: int) -> Iterator[Step]:
    """The all-reduce of one shard by the ranks that own it, one a node."""
    num_shards = len(shards) - 1
    owners = [ranks[_owner(num_shards, len(ranks), shard)] for ranks in nodes]
    start, stop = shards[shard], shards[shard + 1]
    pieces = [start + offset for offset in split.bounds(stop - start, len(nodes))]
    yield from reduce_rounds(pieces, owners, node, finish=True)
    yield from gather_rounds(pieces, owners, node)


def _owner(num_shards: int, num_ranks: int, shard: int) -> int:
    """The rank of a node that owns `shard`."""
    return next(i for i in range(num_ranks) if split.part(num_shards, num_ranks, i)[1] > shard)
