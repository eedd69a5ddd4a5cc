"""The load: from a checkpoint's tables and the wanted parts to reads, each into its place.

        want: [....]  or a box            a want is cut at the borders of pieces, a box into its contiguous runs;
    pieces:  |---|------|----|            what lies close together in a file is read in one go, what is large goes
    reads:      ^^^^^^^^ ^^              straight to its destination

Owns the Checkpoint. All calls are local: each rank reads what it needs, from any number of writers, and never more
than a few MiB beyond. Never goes through virtual datasets.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint.hdf5_types import item_bytes
from hpctrain.checkpoint.schema import PieceRow, StateRow, Tables, TensorSpec, Want
from hpctrain.checkpoint.shard import blob_hash, read_hashes
from hpctrain.checkpoint.system import System, read_exactly
from hpctrain.checkpoint.together import as_checkpoint_error
from hpctrain.checkpoint.validate import Record, blob_name
from hpctrain.errors import CheckpointError, nearest
from hpctrain.plan.boxes import extents, intersect, runs, whole

__all__ = ["Checkpoint"]

_MAX_GAP = 1 << 20  # bytes that are read and thrown away rather than seek
_BOUNCE = 4 << 20  # bytes of the buffer for parts that lie scattered


class _Read(NamedTuple):
    """One contiguous read. `row` is the blob that it covers whole, so that its hash can be checked."""

    file: int
    offset: int
    target: memoryview
    row: PieceRow | StateRow | None


class Checkpoint:
    """One whole checkpoint, found by `find`. Holds no open file; may be read from any thread."""

    def __init__(self, path: Path, record: Record, tables: Tables, system: System = os) -> None:
        self.path = path
        self.step: int = record.manifest["step"]
        self.user: dict[str, Any] = record.manifest["user"]
        self.world_size: int = record.manifest["world_size"]
        self.mesh: dict[str, int] = dict(
            zip(record.manifest["mesh"]["dims"], record.manifest["mesh"]["shape"], strict=True)
        )
        self.manifest = record.manifest
        self.tensors: dict[str, TensorSpec] = {tensor.name: tensor for tensor in tables.tensors}
        self._tables = tables
        self._system = system
        self._pieces: dict[str, list[PieceRow]] = {name: [] for name in self.tensors}
        for piece in sorted(tables.pieces, key=lambda piece: piece.start):
            self._pieces[tables.tensors[piece.tensor].name].append(piece)

    def read(self, wants: Sequence[Want]) -> None:
        """Fills the memory of all wants. Local.

        Pieces that are read whole are checked against their hash. Raises CheckpointError that names the tensor.
        """
        reads = [read for want in wants for read in self._reads_of(want)]
        self._perform(reads)

    def rank_state(self, rank: int) -> dict[str, bytes]:
        """The named bytes that `rank` of the saving job gave; empty for none. Local."""
        if not 0 <= rank < self.world_size:
            raise CheckpointError(f"rank = {rank} must be in 0..{self.world_size - 1}, those that saved {self.path}")
        rows = [row for row in self._tables.states if row.rank == rank]
        blobs = {row.name: bytearray(row.num_bytes) for row in rows}
        self._perform([_Read(r.file, r.offset, memoryview(blobs[r.name]), r) for r in rows if r.num_bytes])
        return {name: bytes(blob) for name, blob in blobs.items()}

    def _reads_of(self, want: Want) -> Iterator[_Read]:
        """Cuts a want into reads, each from one piece."""
        tensor = self.tensors.get(want.name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {want.name!r}{nearest(want.name, self.tensors)}")
        if want.region is None:
            legal, parts = 0 <= want.start <= want.stop <= tensor.count, [(want.start, want.stop - want.start)]
        else:
            box = want.region
            legal = len(box) == len(tensor.shape) and (
                0 in extents(box) or intersect(box, whole(tensor.shape)) == box
            )
            parts = list(runs(box, tensor.shape)) if legal else []
        if not legal:
            asked = f"box {want.region}" if want.region is not None else f"range [{want.start}, {want.stop})"
            raise CheckpointError(f"tensor {want.name!r}: {asked} is not within its shape {tensor.shape}")
        size = item_bytes(tensor.dtype)
        expected = (want.stop - want.start) * size
        if want.memory.nbytes != expected or want.memory.readonly or not want.memory.c_contiguous:
            raise CheckpointError(
                f"tensor {want.name!r}: the destination must be {expected} writable bytes in one run, "
                f"not {want.memory.nbytes}"
            )
        if expected:
            yield from self._cut(self._pieces[want.name], parts, want.memory.cast("B"), size)

    @staticmethod
    def _cut(
        pieces: Sequence[PieceRow], parts: Sequence[tuple[int, int]], memory: memoryview, size: int
    ) -> Iterator[_Read]:
        """The reads that fill `memory` with the runs (first element, count), cut at the pieces' borders."""
        starts = [piece.start for piece in pieces]
        done = 0
        for at, count in parts:
            stop = at + count
            number = bisect_right(starts, at) - 1
            while at < stop:
                piece = pieces[number]
                until = min(stop, piece.stop)
                num_bytes = (until - at) * size
                covered = (at, until) == (piece.start, piece.stop)
                target = memory[done : done + num_bytes]
                yield _Read(piece.file, piece.offset + (at - piece.start) * size, target, piece if covered else None)
                done += num_bytes
                at = until
                number += 1

    def _perform(self, reads: Sequence[_Read]) -> None:
        """Carries out reads file by file, with one file open at a time."""
        by_file: dict[int, list[_Read]] = {}
        for read in reads:
            by_file.setdefault(read.file, []).append(read)
        bounce = memoryview(bytearray(_BOUNCE if reads else 0))
        for number, wanted in sorted(by_file.items()):
            file = self._tables.files[number]
            root_hash = self.manifest["files"][file.name][1]
            with as_checkpoint_error():
                hashes = read_hashes(os.fspath(self.path), file, root_hash, self._system)
                descriptor = self._system.open(f"{self.path}/{file.name}", os.O_RDONLY)
                try:
                    for run in _runs(sorted(wanted, key=lambda read: read.offset)):
                        _fill(descriptor, run, bounce, self._system)
                except EOFError as error:
                    raise CheckpointError(f"{self.path}: {file.name}: {error}") from error
                finally:
                    self._system.close(descriptor)
            for read in wanted:
                if read.row is not None and blob_hash(read.target) != hashes[read.row.hash_row]:
                    name = blob_name(self._tables, read.row)
                    raise CheckpointError(f"{self.path}: {file.name}: {name}: the checksum is wrong")


def _runs(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Groups reads, sorted by offset, so that each group fits into the bounce buffer without large gaps."""
    group: list[_Read] = []
    end = 0
    for read in reads:
        stop = read.offset + len(read.target)
        if group and (read.offset - end > _MAX_GAP or max(stop, end) - group[0].offset > _BOUNCE):
            yield group
            group, end = [], 0
        group.append(read)
        end = max(end, stop)
    if group:
        yield group


def _fill(descriptor: int, reads: Sequence[_Read], bounce: memoryview, system: System) -> None:
    """Reads one group: a single read goes straight to its place, several by way of the bounce buffer."""
    if len(reads) == 1:
        read_exactly(descriptor, reads[0].offset, reads[0].target, system)
        return
    begin = reads[0].offset
    span = bounce[: max(read.offset + len(read.target) for read in reads) - begin]
    read_exactly(descriptor, begin, span, system)
    for read in reads:
        read.target[:] = span[read.offset - begin : read.offset - begin + len(read.target)]
