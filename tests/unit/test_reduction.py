"""Buckets start in one order on every rank, as soon as they may, and whatever is missing starts at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.plan.flat import Bucket
from hpctrain.zero.reduction import GradientReduction


class Recorder:
    """A group that notes what is asked of it."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.log: list[Any] = []

    def start_all_reduce(self, array: np.ndarray, *, name: str) -> Recorder:
        assert name == {6: "gradients 0: c and 1 more", 0: "gradients 1: a and 1 more"}[int(array[0])]
        self.log.append(("start", int(array[0]), len(array)))
        return self

    def advance(self) -> None:
        self.log.append("advance")

    def wait(self) -> None:
        self.log.append("wait")


def make(group: Recorder) -> GradientReduction:
    flat = np.arange(10)
    buckets = [(flat, Bucket(6, 10, frozenset({"d", "c"}))), (flat, Bucket(0, 6, frozenset({"b", "a"})))]
    return GradientReduction(group, buckets)  # type: ignore[arg-type]


def starts(group: Recorder) -> list[Any]:
    return [entry for entry in group.log if entry not in ("advance", "wait")]


def test_a_bucket_starts_while_backward_still_runs() -> None:
    group = Recorder()
    reduction = make(group)
    reduction.ready("d")
    assert starts(group) == []
    reduction.ready("c")
    assert starts(group) == [("start", 6, 4)]
    reduction.ready("b")
    assert group.log[-1] == "advance" and len(starts(group)) == 1
    assert reduction.finish() == {"a"}
    assert starts(group) == [("start", 6, 4), ("start", 0, 6)] and group.log[-2:] == ["wait", "wait"]


def test_a_later_bucket_waits_for_the_earlier_one() -> None:
    group = Recorder()
    reduction = make(group)
    for name in ("a", "b", "c"):
        reduction.ready(name)
    assert starts(group) == []
    reduction.ready("d")
    assert starts(group) == [("start", 6, 4), ("start", 0, 6)]
    assert reduction.finish() == frozenset()


def test_each_step_starts_afresh() -> None:
    group = Recorder()
    reduction = make(group)
    for _ in range(2):
        group.log.clear()
        assert reduction.finish() == {"a", "b", "c", "d"}
        assert starts(group) == [("start", 6, 4), ("start", 0, 6)]


def test_a_group_of_one_moves_nothing() -> None:
    group = Recorder(size=1)
    reduction = make(group)
    for name in "abcd":
        reduction.ready(name)
    assert reduction.finish() == frozenset() and group.log == []
