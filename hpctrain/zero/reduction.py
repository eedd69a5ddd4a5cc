"""Reduces gradient buckets over the data axis while backward is still running.

    backward reports   b.bias  b.weight        a.bias     a.weight
    bucket 0                   |start ... moves on at each report ...... |wait
    bucket 1                                              |start ........|wait

Knows flat buffers and a group; not whose gradients they are. Buckets start in the same order on every rank, whatever
order gradients come in and whichever are missing: bucket i starts when it and all before it are complete, and what
never came is started by `finish` as the zeros that it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Work
from hpctrain.plan.flat import Bucket

__all__ = ["GradientReduction"]


class GradientReduction:
    """Sums flat gradient buffers over `group`, bucket by bucket.

    Used by one training step at a time: any number of `ready(name)`, then one `finish()` (collective over the group),
    which leaves it fresh for the next step. `buckets` holds (flat gradient buffer, bucket) pairs in starting order.
    """

    def __init__(self, group: Group, buckets: Sequence[tuple[Array, Bucket]]) -> None:
        self._group = group
        self._views = [gradient[bucket.start : bucket.stop] for gradient, bucket in buckets]
        self._names = [bucket.names for _, bucket in buckets]
        self._titles = [_title(i, names) for i, names in enumerate(self._names)]
        self._bucket_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._reset()

    def _reset(self) -> None:
        self._missing = [set(names) for names in self._names]
        self._works: list[Work] = []

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete on this rank. Local, never blocks; moves the reductions on."""
        self._missing[self._bucket_of[name]].discard(name)
        if self._group.size == 1:
            return
        while len(self._works) < len(self._views) and not self._missing[len(self._works)]:
            self._start_next()
        self._group.advance()

    def finish(self) -> frozenset[str]:
        """Reduces the rest and waits for all; returns the names never reported here. Collective over the group."""
        if self._group.size > 1:
            while len(self._works) < len(self._views):
                self._start_next()
            for work in self._works:
                work.wait()
        unreported = frozenset[str]().union(*self._missing)
        self._reset()
        return unreported

    def _start_next(self) -> None:
        i = len(self._works)
        self._works.append(self._group.start_all_reduce(self._views[i], name=self._titles[i]))


def _title(number: int, names: Collection[str]) -> str:
    """What a report calls the reduction of a bucket."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"gradients {number}: {min(names, default='none')}{more}"
