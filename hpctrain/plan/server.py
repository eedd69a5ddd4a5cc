"""Parameter server: the first k ranks each add up one k-th of the vector and send the sum back to all.

Owns the all-reduce of that kind. Two rounds, and direct: only servers add. A worker sends and receives n; each server
sends and receives (p - 1) n / k, which is why more servers help, up to k = p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.errors import PlanError
from hpctrain.plan import split
from hpctrain.plan.steps import CollectivePlan, Finish, Step, receive, send

__all__ = ["all_reduce"]


def all_reduce(bounds: Sequence[int], num_servers: int = 1) -> CollectivePlan:
    """Servers are workers too.

    The messages with one server, p = 4:   round 0   1 > 0  2 > 0  3 > 0        round 1   0 > 1  0 > 2  0 > 3
    """
    p, n = len(bounds) - 1, bounds[-1]
    if not 1 <= num_servers <= p:
        raise PlanError(f"num_servers = {num_servers} must be in 1..{p}, the number of ranks")
    shares = split.bounds(n, num_servers)

    def make(rank: int) -> Iterator[Step]:
        servers = [s for s in range(num_servers) if s != rank]
        clients = [q for q in range(p) if q != rank] if rank < num_servers else []
        mine = (shares[rank], shares[rank + 1]) if rank < num_servers else (0, 0)
        yield (
            *(a for s in servers for a in send(s, shares[s], shares[s + 1])),
            *(a for q in clients for a in receive(q, *mine, combine=True)),
        )
        if mine[1] > mine[0]:
            yield (Finish(*mine),)
        yield (
            *(a for q in clients for a in send(q, *mine)),
            *(a for s in servers for a in receive(s, shares[s], shares[s + 1])),
        )

    return CollectivePlan("all_reduce", "parameter server", p, bounds, make, direct=True)
