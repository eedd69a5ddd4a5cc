"""What a checkpoint holds of a trainer, and how each rank writes and reads its share.

Every flat buffer (parameters, and each optimizer slot, laid out alike) has owners (`plan.shards`), at every ZeRO stage
the same ones; a rank writes the tensor pieces in what it owns, padding left out. Parameters are saved as the update
sees them: where there is a master, in its type, and what the model computes with follows from it. Loading reads what a
rank owns in the *new* layout and gathers the rest from the others, so no byte is read twice, whatever ranks, stage and
types were and are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint import Checkpoint, Piece, Saver, TensorSpec, Want, find
from hpctrain.dtypes import dtype_of
from hpctrain.errors import CheckpointError
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.plan.flat import FlatLayout, FlatPiece
from hpctrain.runtime.delayed import Delayed
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.parallel import Parallel
from hpctrain.zero.held import Held, complete
from hpctrain.zero.regions import Region

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["SavedState"]


@dataclass(frozen=True)
class _Source:
    """What this rank has of one flat buffer, its type, and the names that its tensors have in a file."""

    region: Region
    held: Held
    dtype: str
    role: str

    @property
    def layout(self) -> FlatLayout:
        return self.region.layout

    def name(self, parameter: str) -> str:
        return parameter if self.role == "param" else f"optim.{self.role}.{parameter}"

    def pieces(self, rank: int) -> Iterator[FlatPiece]:
        """The tensor pieces that `rank` owns."""
        for start, stop in self.region.shards.owned(rank):
            yield from self.layout.pieces(start, stop)


class SavedState:
    """The trainer's state as pieces of logical tensors. All methods are collective over the world."""

    def __init__(self, context: Context, parallel: Parallel, flat: FlatModel, optimizer: FlatOptimizer,
                 delayed: Delayed) -> None:
        self._context, self._delayed = context, delayed
        self._world, self._group = parallel.world, parallel.data
        self._mesh, self._elsewhere = dict(parallel.mesh), parallel.elsewhere
        self._arrays = flat.model.arrays
        self._model = flat.model
        self._optimizer = optimizer
        self._aliases = parallel.joined({p.name: list(p.aliases) for p in flat.placements if p.aliases})
        names = [*(p.name for p in flat.placements), *flat.model.buffers()]
        self._everywhere = parallel.joined(dict.fromkeys(names, True)).keys()
        self._flat = flat
        self._sources = [_Source(region, master, self._arrays.dtype(master.array), "param")
                         for region, master in zip(flat.regions, flat.parameters.masters, strict=True)]
        self._sources += [_Source(region, Held(own.ranges, array, whole=flat.zero.stage == 0), own.dtype, slot)
                          for slot, state in optimizer.state.items()
                          for region, own, array in zip(flat.trained, optimizer.buffers, state, strict=True)]
        self._savers: dict[tuple[Path, int], Saver] = {}  # each keeps its file templates

    def save(self, root: Path, update: int, keep: int, data: dict[str, Any], loss_scale: dict[str, Any]) -> Path:
        """Writes checkpoint `update` under `root`."""
        self._delayed.publish()
        user = {"update": update, "data": data, "schedules": self._optimizer.schedule_state(), "aliases": self._aliases,
                "loss_scale": loss_scale, "pending": self._delayed.save()}
        sources = [*self._sources, *self._pending(self._delayed.held if user["pending"] else [])]
        pieces = [*self._pieces(sources), *self._buffer_pieces()]
        if (root, keep) not in self._savers:
            self._savers[root, keep] = Saver(root, self._world, keep=keep, env=self._context.description())
        path = self._savers[root, keep].save(update, pieces, user=user, rank_state=self._model.rank_state(),
                                             mesh=self._mesh)
        self._flat.lender.settle()
        return path

    def _pending(self, helds: Sequence[Held]) -> list[_Source]:
        """The gradients whose update comes late."""
        return [_Source(region, held, self._arrays.dtype(held.array), "pending")
                for region, held in zip(self._flat.trained, helds, strict=False)]

    def _pieces(self, sources: Sequence[_Source]) -> Iterator[Piece]:
        for source in sources:
            shapes = source.layout.by_name
            for p in source.pieces(self._group.rank):
                if p.name in self._elsewhere:
                    continue
                spec = TensorSpec(source.name(p.name), source.dtype, shapes[p.name].shape, source.role)
                yield Piece(spec, p.start, p.stop, self._arrays.memory(source.held.piece(p.flat_start, p.flat_stop)))

    def _buffer_pieces(self) -> Iterator[Piece]:
        """Buffers may differ along the data axis (running statistics do); rank 0's are the ones that are kept."""
        if self._group.rank > 0:
            return
        for name, buffer in self._model.buffers().items():
            flat = self._arrays.to_flat(buffer)
            spec = TensorSpec(name, self._arrays.dtype(buffer), self._arrays.shape(buffer), "buffer")
            yield Piece(spec, 0, len(flat), self._arrays.memory(flat))

    def load(self, where: Path, *, must_exist: bool) -> tuple[int, dict[str, Any], dict[str, Any] | None] | None:
        """Reads a checkpoint into the live buffers; returns (applied updates, data, loss scale), or None: there is
        none.
        """
        checkpoint = find(where, self._world, must_exist=must_exist)
        if checkpoint is None:
            return None
        with self._world.agree():
            self._check(checkpoint)
        waiting = checkpoint.user.get("pending")
        late = self._pending(self._delayed.prepare(waiting))
        sources = [s for s in [*self._sources, *late] if self._is_saved(checkpoint, s)]
        with self._world.agree():
            after: list[Callable[[], None]] = []
            checkpoint.read([want for source in sources for want in self._wants(source, checkpoint, after)])
            for store in after:
                store()
            self._read_buffers(checkpoint)
        for source in sources:
            if source.role != "param" and source.held.whole and self._group.size > 1:
                complete(self._group, source.region.shards, source.held)
        self._flat.parameters.loaded()
        if checkpoint.world_size == self._world.size:
            self._model.restore_rank_state(checkpoint.rank_state(self._world.rank))
        self._optimizer.restore_schedules(checkpoint.user["schedules"])
        self._delayed.restore(waiting)
        self._flat.lender.settle()
        return checkpoint.user["update"], checkpoint.user["data"], checkpoint.user.get("loss_scale")

    def _check(self, checkpoint: Checkpoint) -> None:
        """The same parameters and buffers, by name, shape and dtype; floating point numbers of any width will do."""
        mine = {s.name(slot.name): (slot.shape, s.dtype) for s in self._sources if s.role == "param"
                for slot in s.layout.slots}
        mine |= {n: (self._arrays.shape(b), self._arrays.dtype(b)) for n, b in self._model.buffers().items()}
        saved = {n: (t.shape, t.dtype) for n, t in checkpoint.tensors.items() if t.role in ("param", "buffer")}
        problems = [f"{n!r} is missing in the file" for n in mine.keys() - saved.keys()]
        problems += [f"{n!r} is not in the model" for n in saved.keys() - self._everywhere]
        problems += [f"{n!r} is {saved[n]} in the file, {mine[n]} in the model" for n in mine.keys() & saved.keys()
                     if saved[n] != mine[n] and not (saved[n][0] == mine[n][0] and _floats(saved[n][1], mine[n][1]))]
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
            self._arrays.fill(source.held.array, 0)
        return len(missing) < len(source.layout.slots)

    def _wants(self, source: _Source, checkpoint: Checkpoint, after: list[Callable[[], None]]) -> Iterator[Want]:
        """What this rank reads of a buffer; what is of another type in the file is stored by `after`."""
        arrays = self._arrays
        for p in source.pieces(self._group.rank):
            name = source.name(p.name)
            if name not in checkpoint.tensors:
                continue
            home = into = source.held.piece(p.flat_start, p.flat_stop)
            saved = checkpoint.tensors[name].dtype
            if saved != source.dtype:
                into = arrays.empty(p.stop - p.start, saved)
                after.append(partial(arrays.assign, home, into))
            yield Want(name, p.start, p.stop, arrays.memory(into))

    def _read_buffers(self, checkpoint: Checkpoint) -> None:
        for name, buffer in self._model.buffers().items():
            flat = self._arrays.to_flat(buffer)
            checkpoint.read([Want(name, 0, len(flat), self._arrays.memory(flat))])
            self._arrays.assign(buffer, flat)


def _floats(*dtypes: str) -> bool:
    return all(dtype_of(dtype).kind == "float" for dtype in dtypes)
