"""Applies an optimizer to what one rank owns of flat buffers: chooses ranges and numbers; `Arrays` do the arithmetic.

Knows own ranges of flat buffers of one dtype each, and groups; not models, not other ranks, not how ranges are dealt
out. With one rank, or without sharding, the one range is the whole buffer. All calls are local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

from hpctrain.contracts import Array, Arrays
from hpctrain.optim.groups import ResolvedGroup
from hpctrain.optim.home import Chunk, Home, Memory, Span
from hpctrain.optim.options import LAMB, Muon, Optimizer
from hpctrain.optim.own import OwnBuffer, Piece, chunks, element_pieces, tensor_pieces
from hpctrain.optim.whole_tensors import WholeTensor, update_whole

__all__ = ["FlatOptimizer"]

CHUNK = 4 << 20  # elements that are updated at once: 16 MiB of a float32 array


@dataclass(frozen=True)
class _Run:
    """One chunk of one buffer with its numbers and memory; the lists have one entry a piece."""

    group: int
    weight_decay: float
    buffer: int
    pieces: tuple[Piece, ...]
    masters: list[Array]
    states: list[list[Array]]  # by slot
    copies: list[Array]  # none where the masters are the parameters


class FlatOptimizer:
    """An optimizer over what one rank owns. Owns its state: `state[slot][i]` belongs to `buffers[i]`, laid out as own
    array. `home` lends the memory of the states.

    Raises UnsupportedError if a range cuts a tensor that the optimizer needs as a whole.
    """

    def __init__(self, arrays: Arrays, optimizer: Optimizer, groups: Sequence[ResolvedGroup],
                 buffers: Sequence[OwnBuffer], home: Home | None = None) -> None:
        self._arrays = arrays
        self._home: Home = home or Memory(arrays)
        self.optimizer = optimizer
        self.groups = tuple(groups)
        self.buffers = tuple(buffers)
        self.state: dict[str, list[Array]] = {
            slot: [self._home.zeros(slot, i, b.count, b.dtype) for i, b in enumerate(buffers)]
            for slot in optimizer.slots
        }
        self._schedule_state: list[dict[str, Any]] = [{} for _ in groups]
        self._runs = list(self._make_runs())
        self._home.expect([_spans(run) for run in self._runs])

    def _make_runs(self) -> Iterator[_Run]:
        for i, group in enumerate(self.groups):
            for member, (number, b) in product(group.members, enumerate(self.buffers)):
                if self.optimizer.ownership == "tensor":
                    pieces = tensor_pieces(b, member.names, type(self.optimizer).__name__)
                else:
                    pieces = element_pieces(b, member.names, CHUNK)
                for chunk in chunks(pieces, CHUNK):
                    masters = [b.masters[p.range][p.in_range] for p in chunk]
                    copies = [b.copies[p.range][p.in_range] for p in chunk] if b.copies else []
                    states = [[state[number][p.in_own] for p in chunk] for state in self.state.values()]
                    yield _Run(i, member.weight_decay, number, chunk, masters, states, copies)

    def over(self, buffers: Sequence[OwnBuffer]) -> FlatOptimizer:
        """This optimizer, with its state, for other memory of the same ranges: masters or copies lie elsewhere."""
        twin = copy(self)
        twin.buffers = tuple(buffers)
        twin._runs = list(twin._make_runs())
        return twin

    def learning_rates(self, update: int) -> list[float]:
        """The learning rate of each group for the update after `update` applied ones."""
        return [group.lr * group.schedule.factor(update, state)
                for group, state in zip(self.groups, self._schedule_state, strict=True)]

    def apply(self, update: int, scale: float, gradients: Sequence[Sequence[Array]]) -> None:
        """Updates all that is owned with gradient `scale * gradients`; `update` counts the updates applied before.

        `gradients[i][k]` is the flat gradient of range k of buffer i and holds `scale *` itself afterwards. Chunk by
        chunk, one pass over memory each; copies are written along.
        """
        rates = self.learning_rates(update)
        for i, run in enumerate(self._runs):
            self._home.before(i)
            numbers = self.optimizer.numbers(lr=rates[run.group], weight_decay=run.weight_decay, step=update + 1,
                                             scale=scale)
            chunk = [gradients[run.buffer][p.range][p.in_range] for p in run.pieces]
            if isinstance(self.optimizer, LAMB | Muon):
                for tensor, gradient in zip(self._tensors(run), chunk, strict=True):
                    update_whole(self._arrays, self.optimizer, tensor, gradient, numbers)
            else:
                self._arrays.update(numbers, run.masters, chunk, run.states, run.copies)
            self._home.after(i)

    def _tensors(self, run: _Run) -> Iterator[WholeTensor]:
        for k, p in enumerate(run.pieces):
            shape = self.buffers[run.buffer].layout.by_name[p.name].shape
            yield WholeTensor(p.name, shape, run.masters[k], [state[k] for state in run.states],
                              run.copies[k] if run.copies else None)

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


def _spans(run: _Run) -> Chunk:
    return tuple(Span(run.buffer, p.in_own.start, p.in_own.stop) for p in run.pieces)
