"""Who writes what: the rows that each rank announces, joined into the tables of the whole checkpoint.

Owns the check that the pieces of all ranks cover every tensor exactly once. Pure data; knows neither files nor HDF5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.checkpoint.hdf5_types import item_bytes
from hpctrain.checkpoint.schema import (
    MAX_DIMS,
    FileRow,
    Piece,
    PieceRow,
    StateRow,
    Tables,
    TensorSpec,
    link_name,
    shard_name,
)
from hpctrain.checkpoint.template import Template
from hpctrain.errors import CheckpointError

__all__ = ["announce", "check_coverage", "check_pieces", "join"]


def check_pieces(pieces: Sequence[Piece]) -> None:
    """Refuses, before anything is written, pieces that cannot be right on their own. Local."""
    for piece in pieces:
        tensor = piece.tensor
        where = f"tensor {tensor.name!r}"
        link_name(tensor.name)
        if len(tensor.shape) > MAX_DIMS or any(length < 0 for length in tensor.shape):
            raise CheckpointError(f"{where}: shape {tensor.shape} must have at most {MAX_DIMS} dims, none negative")
        if not 0 <= piece.start <= piece.stop <= tensor.count:
            raise CheckpointError(
                f"{where}: piece [{piece.start}, {piece.stop}) must lie in [0, {tensor.count}), its elements"
            )
        expected = (piece.stop - piece.start) * item_bytes(tensor.dtype)
        if piece.memory.nbytes != expected:
            raise CheckpointError(
                f"{where}: piece [{piece.start}, {piece.stop}) of {tensor.dtype} needs {expected} bytes of memory, "
                f"not {piece.memory.nbytes}"
            )
        if not piece.memory.c_contiguous:
            raise CheckpointError(f"{where}: the memory of a piece must be C-contiguous")


def announce(pieces: Sequence[Piece], states: Mapping[str, bytes], template: Template) -> dict[str, Any]:
    """What this rank tells the others, as JSON-able rows. `template` was built from its non-empty pieces. Local."""
    tensors: dict[TensorSpec, int] = {}
    for piece in pieces:
        tensors.setdefault(piece.tensor, len(tensors))
    places = list(zip(template.offsets, template.hash_rows, strict=True))
    full = [piece for piece in pieces if piece.stop > piece.start]
    return {
        "tensors": [[t.name, t.dtype, list(t.shape), t.role] for t in tensors],
        "pieces": [
            [tensors[piece.tensor], piece.start, piece.stop, *place]
            for piece, place in zip(full, places, strict=False)
        ],
        "states": [
            [name, len(states[name]), *place]
            for name, place in zip(states, places[len(full) :], strict=True)
        ],
        "file": [template.size, len(template.head), template.tail_start, template.hash_offset, template.num_hashes],
    }  # fmt: skip


def join(announced: Sequence[Mapping[str, Any]]) -> Tables:
    """The tables of all ranks' rows (in rank order), checked. Local.

    Raises CheckpointError that names the tensor, when ranks disagree on it or do not cover it exactly once.
    """
    tensors: dict[str, tuple[int, TensorSpec, int]] = {}  # name: (number, what it is, the rank that said so)
    files, pieces, states = [], [], []
    for rank, rows in enumerate(announced):
        own = []
        for name, dtype, shape, role in rows["tensors"]:
            tensor = TensorSpec(name, dtype, tuple(shape), role)
            number, known, first = tensors.setdefault(name, (len(tensors), tensor, rank))
            if known != tensor:
                raise CheckpointError(f"tensor {name!r} is {known} on rank {first} and {tensor} on rank {rank}")
            own.append((number, item_bytes(dtype)))
        files.append(FileRow(shard_name(rank), *rows["file"]))
        for index, start, stop, offset, hash_row in rows["pieces"]:
            number, size = own[index]
            pieces.append(PieceRow(number, rank, start, stop, offset, (stop - start) * size, hash_row))
        states += [StateRow(rank, name, rank, at, size, row) for name, size, at, row in rows["states"]]
    tables = Tables(tuple(spec for _, spec, _ in tensors.values()), tuple(files), tuple(sorted(pieces)), tuple(states))
    check_coverage(tables)
    return tables


def check_coverage(tables: Tables) -> None:
    """Raises CheckpointError for the first tensor whose elements are not each in exactly one piece. Local."""
    reached = [0] * len(tables.tensors)
    last = [-1] * len(tables.tensors)
    for piece in sorted(tables.pieces, key=lambda piece: (piece.tensor, piece.start, piece.stop)):
        name, at = tables.tensors[piece.tensor].name, reached[piece.tensor]
        if piece.start > at:
            raise CheckpointError(f"tensor {name!r}: elements [{at}, {piece.start}) are given by no rank")
        if piece.start < at:
            raise CheckpointError(
                f"tensor {name!r}: elements [{piece.start}, {min(at, piece.stop)}) are given twice, "
                f"by ranks {last[piece.tensor]} and {piece.file}"
            )
        reached[piece.tensor], last[piece.tensor] = piece.stop, piece.file
    for tensor, at in zip(tables.tensors, reached, strict=True):
        if at < tensor.count:
            raise CheckpointError(f"tensor {tensor.name!r}: elements [{at}, {tensor.count}) are given by no rank")
