"""Which way a collective takes: shared memory, the transport's own library, or a plan's messages.

Owns this choice, which is a function of what all ranks share: the call, the group, what the transport offers. Whether
the ranks' arrays really lie in shared memory shows only when they meet; `algorithm` is for the case that they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hpctrain.dtypes import dtype_of

__all__ = ["DEFAULTS", "NATIVE", "SHARED", "SHARED_BYTES", "Call", "Chooses", "Way"]

#: What is used where no chooser is given; sums of half types have ways of their own, see `reductions`.
DEFAULTS = {
    "broadcast": "ring", "scatter": "binomial tree", "gather": "binomial tree", "reduce": "binomial tree",
    "all_reduce": "ring", "reduce_scatter": "pairwise", "all_gather": "ring", "all_to_all": "pairwise",
}
SHARED_BYTES = 64 * 1024  # from here on shared memory is used where no chooser is given

NATIVE, SHARED = "native", "shared memory"  # algorithms that are no plans


class Chosen(Protocol):
    """What a chooser says."""

    @property
    def algorithm(self) -> str:
        """A name of `hpctrain.plan.algorithms.ALGORITHMS`, or one of the ways that the chooser was offered."""


class Chooses(Protocol):
    """What a group asks of a chooser; the answer depends on nothing but the arguments, which all ranks share."""

    def choose(self, operation: str, num_bytes: int, num_ranks: int, num_nodes: int, dtype: str,
               ways: frozenset[str] = frozenset()) -> Chosen:
        """The algorithm for one call; `ways`: what there is besides plans, of NATIVE and SHARED."""


@dataclass(slots=True)
class Call:
    """One collective call: the plan's operation, how it is told to the observer, and what the caller asked for."""

    operation: str
    title: str  # with whatever else must be the same on all ranks: "all_reduce sum"
    dtype: str
    count: int  # elements of the whole array
    algorithm: str | None = None
    name: str = ""
    root: int = 0
    reduction: str = ""  # as the transport's library knows it: a mean is a sum

    @property
    def num_bytes(self) -> int:
        """Of the whole array."""
        return self.count * dtype_of(self.dtype).num_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """`near`: shared memory first; `native`: the transport's library; else, and where arrays are not shared, a plan."""

    algorithm: str
    near: bool = False
    native: bool = False
