"""Every collective algorithm by name: which operation it serves, and how its plan is made.

Owns the table and nothing else. What fits which size is chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import PlanError, UnsupportedError, choices, nearest
from hpctrain.plan import (
    bidirectional,
    bruck,
    doubling,
    naive,
    pairwise,
    rabenseifner,
    ring,
    scatter_gather,
    server,
    split,
    tree,
    two_level,
)
from hpctrain.plan.rows import EvenRows
from hpctrain.plan.steps import CollectivePlan

__all__ = ["ALGORITHMS", "Wanted", "check_algorithm", "make_plan"]


@dataclass(frozen=True)
class Wanted:
    """What a plan is made for: the shape of the data and the settings that one algorithm or another asks for.

    `block` bounds the elements that a pairwise reduction has open at a time.
    """

    num_ranks: int
    bounds: Sequence[int]
    root: int = 0
    node_size: int | None = None
    num_servers: int | None = None
    block: int | None = None


def _two_level(wanted: Wanted) -> CollectivePlan:
    if wanted.node_size is None:
        raise PlanError("algorithm 'two-level' needs node_size, the number of ranks of a node")
    return two_level.all_reduce(wanted.bounds, wanted.node_size)


#: operation -> algorithm -> the function that makes its plan.
ALGORITHMS: Mapping[str, Mapping[str, Callable[[Wanted], CollectivePlan]]] = {
    "broadcast": {
        "naive": lambda w: naive.broadcast(w.bounds, w.num_ranks, w.root),
        "ring": lambda w: ring.broadcast(w.bounds, w.num_ranks, w.root),
        "binomial tree": lambda w: tree.broadcast(w.bounds, w.num_ranks, w.root),
        "scatter + all-gather": lambda w: scatter_gather.broadcast(w.bounds[-1], w.num_ranks, w.root),
    },
    "scatter": {
        "naive": lambda w: naive.scatter(w.bounds, w.root),
        "binomial tree": lambda w: tree.scatter(w.bounds, w.root),
    },
    "gather": {
        "naive": lambda w: naive.gather(w.bounds, w.root),
        "binomial tree": lambda w: tree.gather(w.bounds, w.root),
    },
    "reduce": {
        "naive": lambda w: naive.reduce(w.bounds, w.root),
        "binomial tree": lambda w: tree.reduce(w.bounds, w.root),
        "rabenseifner": lambda w: rabenseifner.reduce(w.bounds, w.root),
    },
    "all_reduce": {
        "naive": lambda w: naive.all_reduce(w.bounds),
        "parameter server": lambda w: server.all_reduce(w.bounds, 1 if w.num_servers is None else w.num_servers),
        "ring": lambda w: ring.all_reduce(w.bounds),
        "bidirectional ring": lambda w: bidirectional.all_reduce(w.bounds),
        "recursive doubling": lambda w: doubling.all_reduce(w.bounds),
        "rabenseifner": lambda w: rabenseifner.all_reduce(w.bounds),
        "binomial tree": lambda w: tree.all_reduce(w.bounds),
        "pairwise": lambda w: pairwise.all_reduce(w.bounds, w.block),
        "two-level": _two_level,
    },
    "reduce_scatter": {
        "naive": lambda w: naive.reduce_scatter(w.bounds),
        "ring": lambda w: ring.reduce_scatter(w.bounds),
        "bidirectional ring": lambda w: bidirectional.reduce_scatter(w.bounds),
        "rabenseifner": lambda w: rabenseifner.reduce_scatter(w.bounds),
        "pairwise": lambda w: pairwise.reduce_scatter(w.bounds, w.block),
    },
    "all_gather": {
        "naive": lambda w: naive.all_gather(w.bounds),
        "ring": lambda w: ring.all_gather(w.bounds),
        "bidirectional ring": lambda w: bidirectional.all_gather(w.bounds),
        "recursive doubling": lambda w: doubling.all_gather(w.bounds),
        "bruck": lambda w: bruck.all_gather(w.bounds),
    },
    "all_to_all": {
        "naive": lambda w: naive.all_to_all(w.bounds, w.num_ranks),
        "pairwise": lambda w: pairwise.all_to_all(w.bounds, w.num_ranks),
        "bruck": lambda w: bruck.all_to_all(w.bounds, w.num_ranks),
    },
}


def make_plan(operation: str, algorithm: str, num_ranks: int, bounds_or_count: Sequence[int] | int, *, root: int = 0,
              node_size: int | None = None, num_servers: int | None = None, block: int | None = None) -> CollectivePlan:
    """The plan of `operation` by `algorithm`, both named as in ALGORITHMS.

    Args:
        bounds_or_count: the offsets of the parts (see `CollectivePlan`), or the elements of the whole vector, which is
            then split evenly; for an all-to-all, of the vector that one rank sends.
        node_size: ranks of a node, for "two-level".
        num_servers: for "parameter server", 1 if not given.
        block: elements that the owner's sum of a "pairwise" reduction has open at a time; all if not given.

    Raises:
        UnsupportedError: no such operation or algorithm; the message lists the legal ones.
        PlanError: a number is out of its range.
    """
    check_algorithm(operation, algorithm)
    if num_ranks < 1:
        raise PlanError(f"num_ranks = {num_ranks} must be at least 1")
    bounds: Sequence[int]
    if not isinstance(bounds_or_count, int):
        bounds = bounds_or_count if isinstance(bounds_or_count, EvenRows) else tuple(bounds_or_count)
    elif operation == "all_to_all":
        bounds = EvenRows(bounds_or_count, num_ranks)
    else:
        bounds = split.bounds(bounds_or_count, num_ranks)
    return ALGORITHMS[operation][algorithm](Wanted(num_ranks, bounds, root, node_size, num_servers, block))


def check_algorithm(operation: str, algorithm: str) -> None:
    """Refuses a name that is not in ALGORITHMS; the message lists the legal ones."""
    if operation not in ALGORITHMS:
        hint = nearest(operation, ALGORITHMS)
        raise UnsupportedError(f"operation {operation!r} is unknown{hint}; legal are {choices(ALGORITHMS)}")
    makers = ALGORITHMS[operation]
    if algorithm not in makers:
        hint = nearest(algorithm, makers)
        raise UnsupportedError(f"algorithm {algorithm!r} is unknown for {operation}{hint}; legal are {choices(makers)}")
