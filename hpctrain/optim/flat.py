"""Applies an optimizer to flat buffers: chooses ranges and numbers, lets the array library do the arithmetic.

Knows flat buffers of one dtype each, and groups; not models, not other ranks. All calls are local.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.contracts import Array, Arrays
from hpctrain.optim.groups import Member, ResolvedGroup, merged_ranges
from hpctrain.optim.options import AdamW, Optimizer
from hpctrain.plan.flat import FlatLayout

__all__ = ["FlatBuffers", "FlatOptimizer"]


@dataclass(frozen=True)
class FlatBuffers:
    """The trained parameters of one dtype and their gradients, laid out alike."""

    layout: FlatLayout
    parameters: Array
    gradients: Array


class FlatOptimizer:
    """An optimizer over the buffers of one rank. Owns its state: `state[slot][i]` belongs to `buffers[i]`."""

    def __init__(self, arrays: Arrays, optimizer: Optimizer, groups: Sequence[ResolvedGroup],
                 buffers: Sequence[FlatBuffers]) -> None:
        self._arrays = arrays
        self.optimizer = optimizer
        self.groups = tuple(groups)
        self.state: dict[str, list[Array]] = {
            slot: [arrays.zeros(b.layout.count, b.layout.dtype) for b in buffers] for slot in optimizer.slots
        }
        self._schedule_state: list[dict[str, Any]] = [{} for _ in groups]
        self._runs = [(i, member, self._views(buffers, member)) for i, group in enumerate(groups)
                      for member in group.members]

    def _views(self, buffers: Sequence[FlatBuffers], member: Member) -> list[list[Array]]:
        """Views of parameters, gradients and each slot over the ranges of `member`."""
        ranges = [(i, r) for i, b in enumerate(buffers) for r in merged_ranges(b.layout, member.names)]
        sources = [[b.parameters for b in buffers], [b.gradients for b in buffers], *self.state.values()]
        return [[source[i][start:stop] for i, (start, stop) in ranges] for source in sources]

    def learning_rates(self, update: int) -> list[float]:
        """The learning rate of each group for the update after `update` applied ones."""
        return [group.lr * group.schedule.factor(update, state)
                for group, state in zip(self.groups, self._schedule_state, strict=True)]

    def apply(self, update: int, scale: float) -> None:
        """Updates all parameters with gradient `scale * gradients`; `update` counts those applied before."""
        rates = self.learning_rates(update)
        for group, member, views in self._runs:
            common: dict[str, Any] = {"scale": scale, "lr": rates[group], "weight_decay": member.weight_decay,
                                      "step": update + 1}
            if isinstance(self.optimizer, AdamW):
                beta1, beta2 = self.optimizer.betas
                self._arrays.adamw(*views, beta1=beta1, beta2=beta2, eps=self.optimizer.eps, **common)
            else:
                momentum = views[2] if len(views) > 2 else []
                self._arrays.sgd(views[0], views[1], momentum, momentum_factor=self.optimizer.momentum,
                                 nesterov=self.optimizer.nesterov, **common)

    def observe(self, value: float) -> None:
        """Feeds a measured value, the same on every rank, to the schedules that want one."""
        for group, state in zip(self.groups, self._schedule_state, strict=True):
            group.schedule.observe(value, state)

    def schedule_state(self) -> dict[str, dict[str, Any]]:
        """What the schedules remember, by group name; plain JSON values."""
        return {g.name: dict(s) for g, s in zip(self.groups, self._schedule_state, strict=True)}

    def restore_schedules(self, saved: dict[str, dict[str, Any]]) -> None:
        """Takes back what `schedule_state` gave; groups that are new start fresh."""
        for group, state in zip(self.groups, self._schedule_state, strict=True):
            state.clear()
            state.update(saved.get(group.name, {}))
