"""This rank's share of its node's cores.

Owns the number of threads that array libraries may use here, and the set of cores that the process may run on. Left
alone, each of several ranks on a node starts one thread a core and they slow each other down; and some libraries
narrow the process's set of allowed cores while they are imported. Must not know MPI: the ranks' core sets come in as
plain data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from hpctrain import log
from hpctrain.contracts import Array, Arrays, ArraysOf
from hpctrain.runtime.cores import fair_shares

__all__ = ["Threads", "allowed_cores", "fair_share"]

_LIBRARIES = ("numpy", "torch", "cupy")


def allowed_cores() -> frozenset[int]:
    """The cores that this process may run on; every core of the machine where the system does not tell. Local."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def fair_share(core_sets: Sequence[Sequence[int]], local_rank: int) -> int:
    """Threads for one of the ranks of a node: its fair share of the cores, rounded down; at least 1. Pure."""
    return max(1, int(fair_shares(core_sets)[local_rank]))


class Threads:
    """Applies this rank's thread count to each array library when it is first seen. Local.

    `count` is the number of threads; `user_variable` the environment variable by which the user chose it, or None. The
    libraries read that variable by themselves and are then left alone.
    """

    def __init__(self, count: int, allowed: frozenset[int], user_variable: str | None = None) -> None:
        self.count = count
        self.allowed = allowed
        self.user_variable = user_variable
        self._seen: set[str] = set()

    def watching(self, arrays_of: ArraysOf) -> ArraysOf:
        """`arrays_of`, which applies the count as soon as it meets a library for the first time."""

        def watched(array: Array) -> Arrays:
            arrays = arrays_of(array)
            if arrays.name not in self._seen:
                self.apply(arrays)
            return arrays

        return watched

    def apply_to_loaded(self, arrays_of: ArraysOf) -> None:
        """Applies the count to the libraries that the program has imported already."""
        for name in _LIBRARIES:
            empty = getattr(sys.modules.get(name), "empty", None)
            if empty is not None:
                with suppress(ValueError, RuntimeError):  # a library without a backend, or without its device
                    self.apply(arrays_of(empty(0)))

    def apply(self, arrays: Arrays) -> None:
        """Limits one library, and undoes what its import did to the allowed cores."""
        self._seen.add(arrays.name)
        self.restore(arrays.name)
        if self.user_variable is None:
            arrays.set_num_threads(self.count)

    def restore(self, suspect: str) -> None:
        """Gives this process its cores back if it lost some since the start; `suspect` is named in the line."""
        now = allowed_cores()
        if now < self.allowed:
            os.sched_setaffinity(0, self.allowed)
            log.once(f"loading {suspect} cut this process's cores from {len(self.allowed)} to {len(now)}; restored")
