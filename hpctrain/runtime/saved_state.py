"""What a checkpoint holds of a trainer, and how each rank writes and reads its share.

Every flat buffer (parameters, and each optimizer slot, laid out alike) is cut over the ranks by `plan.split`; a rank
writes the tensor pieces that lie in its part, padding left out. Loading reads each rank's part of the *new* layout and
gathers the rest from the others, so no byte is read twice, whatever the numbers of ranks were and are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint import Checkpoint, Piece, Saver, TensorSpec, Want, find
from hpctrain.contracts import Array
from hpctrain.errors import CheckpointError
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.plan.flat import FlatLayout
from hpctrain.plan.split import bounds, part
from hpctrain.runtime.flat_model import FlatModel

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["SavedState"]


@dataclass(frozen=True)
class _Source:
    """One flat buffer of the trainer and the names its tensors have in a file."""

    layout: FlatLayout
    array: Array
    role: str

    def name(self, parameter: str) -> str:
        return parameter if self.role == "param" else f"optim.{self.role}.{parameter}"


class SavedState:
    """The trainer's state as pieces of logical tensors. All methods are collective over the world."""

    def __init__(self, context: Context, flat: FlatModel, optimizer: FlatOptimizer) -> None:
        self._context = context
        self._group = context.world
        self._arrays = flat.model.arrays
        self._model = flat.model
        self._optimizer = optimizer
        self._aliases = {p.name: list(p.aliases) for p in flat.placements if p.aliases}
        self._sources = [_Source(b.layout, b.parameters, "param") for b in flat.trained]
        self._sources += [_Source(layout, array, "param") for layout, array in flat.frozen]
        self._sources += [_Source(b.layout, array, slot) for slot, state in optimizer.state.items()
                          for b, array in zip(flat.trained, state, strict=True)]
        self._savers: dict[tuple[Path, int], Saver] = {}  # each keeps its file templates

    def save(self, root: Path, update: int, keep: int, data: dict[str, Any]) -> Path:
        """Writes checkpoint `update` under `root`."""
        user = {"update": update, "data": data, "schedules": self._optimizer.schedule_state(), "aliases": self._aliases}
        pieces = [*self._pieces(), *self._buffer_pieces()]
        if (root, keep) not in self._savers:
            self._savers[root, keep] = Saver(root, self._group, keep=keep, env=self._context.description())
        return self._savers[root, keep].save(update, pieces, user=user, rank_state=self._model.rank_state(),
                          mesh={"data": self._group.size})

    def _pieces(self) -> Iterator[Piece]:
        for source in self._sources:
            shapes = source.layout.by_name
            for p in source.layout.pieces(*self._share(source.layout)):
                spec = TensorSpec(source.name(p.name), source.layout.dtype, shapes[p.name].shape, source.role)
                yield Piece(spec, p.start, p.stop, self._arrays.memory(source.array[p.flat_start : p.flat_stop]))

    def _share(self, layout: FlatLayout) -> tuple[int, int]:
        return part(layout.count, self._group.size, self._group.rank)

    def _buffer_pieces(self) -> Iterator[Piece]:
        """Buffers may differ between ranks (running statistics do); rank 0's are the ones that are kept."""
        if self._group.rank > 0:
            return
        for name, buffer in self._model.buffers().items():
            flat = self._arrays.to_flat(buffer)
            spec = TensorSpec(name, self._arrays.dtype(buffer), self._arrays.shape(buffer), "buffer")
            yield Piece(spec, 0, len(flat), self._arrays.memory(flat))

    def load(self, where: Path, *, must_exist: bool) -> tuple[int, dict[str, Any]] | None:
        """Reads a checkpoint into the live buffers; returns (applied updates, data), or None if there is none."""
        checkpoint = find(where, self._group, must_exist=must_exist)
        if checkpoint is None:
            return None
        with self._group.agree():
            self._check(checkpoint)
        sources = [s for s in self._sources if self._is_saved(checkpoint, s)]
        with self._group.agree():
            checkpoint.read([want for source in sources for want in self._wants(source, checkpoint)])
            self._read_buffers(checkpoint)
        for source in sources:
            self._group.all_gather_into(source.array, bounds(source.layout.count, self._group.size))
        if checkpoint.world_size == self._group.size:
            self._model.restore_rank_state(checkpoint.rank_state(self._group.rank))
        self._optimizer.restore_schedules(checkpoint.user["schedules"])
        return checkpoint.user["update"], checkpoint.user["data"]

    def _check(self, checkpoint: Checkpoint) -> None:
        """The same parameters and buffers, by name, shape and dtype."""
        mine = {s.name(slot.name): (slot.shape, s.layout.dtype) for s in self._sources if s.role == "param"
                for slot in s.layout.slots}
        mine |= {n: (self._arrays.shape(b), self._arrays.dtype(b)) for n, b in self._model.buffers().items()}
        saved = {n: (t.shape, t.dtype) for n, t in checkpoint.tensors.items() if t.role in ("param", "buffer")}
        problems = [f"{n!r} is missing in the file" for n in mine.keys() - saved.keys()]
        problems += [f"{n!r} is not in the model" for n in saved.keys() - mine.keys()]
        problems += [f"{n!r} is {saved[n]} in the file, {mine[n]} in the model" for n in mine.keys() & saved.keys()
                     if saved[n] != mine[n]]
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"{checkpoint.path} is of another model: {'; '.join(sorted(problems)[:8])}{more}")

    def _is_saved(self, checkpoint: Checkpoint, source: _Source) -> bool:
        """Whether the file has this buffer's tensors; optimizer state it lacks starts fresh, with a word."""
        missing = [slot.name for slot in source.layout.slots if source.name(slot.name) not in checkpoint.tensors]
        if missing and self._context.rank == 0:
            warnings.warn(f"{checkpoint.path} has no {source.role!r} for {len(missing)} parameters ({missing[0]!r} is "
                          "one); this optimizer state starts fresh", stacklevel=2)
        if missing:
            self._arrays.fill(source.array, 0)
        return len(missing) < len(source.layout.slots)

    def _wants(self, source: _Source, checkpoint: Checkpoint) -> Iterator[Want]:
        for p in source.layout.pieces(*self._share(source.layout)):
            name = source.name(p.name)
            if name in checkpoint.tensors:
                yield Want(name, p.start, p.stop, self._arrays.memory(source.array[p.flat_start : p.flat_stop]))

    def _read_buffers(self, checkpoint: Checkpoint) -> None:
        for name, buffer in self._model.buffers().items():
            flat = self._arrays.to_flat(buffer)
            checkpoint.read([Want(name, 0, len(flat), self._arrays.memory(flat))])
            self._arrays.assign(buffer, flat)
