"""The index file: the layout tables for our reader, and virtual datasets that show people and tools whole tensors.

Owns index.h5: its skeleton (built once per layout, the same bytes for every save but for /save) and its parsing. Our
own reader uses only the tables: a virtual dataset returns fill values, with no error, where a source is missing.
Knows nothing of ranks or of how a save is committed.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.hdf5_types import fill_value, h5py_module, type_of
from hpctrain.checkpoint.schema import MAX_DIMS, FileRow, PieceRow, StateRow, Tables, TensorSpec, link_name
from hpctrain.checkpoint.template import create_file, dataset, set_numbers, set_text, stamp, subgroup
from hpctrain.errors import CheckpointError
from hpctrain.plan.boxes import extents, range_boxes, volume

__all__ = ["MAX_MAPPINGS", "IndexTemplate", "build_index", "parse_index"]

MAX_MAPPINGS = 200_000  # of virtual datasets; above, building and opening them takes longer than it is worth
MAX_SOURCES = 512  # files; above, a usual open-file limit lets HDF5 show fill values instead
_FLAT = 1  # kind of a piece: a flat range; 0 is kept for boxes


@dataclass(frozen=True)
class IndexTemplate:
    """The bytes of index.h5, and where the step and the identity of the save belong in them."""

    data: bytes
    step_offset: int
    id_offset: int

    def patched(self, step: int, save_id: bytes) -> bytes:
        """The index of one save."""
        data = bytearray(self.data)
        data[self.step_offset : self.step_offset + 8] = step.to_bytes(8, "little")
        data[self.id_offset : self.id_offset + 16] = save_id
        return bytes(data)


def build_index(tables: Tables, world_size: int, mesh: Mapping[str, int]) -> IndexTemplate:
    """Makes the index of a layout. Local; takes about 50 microseconds a mapping."""
    h5py = h5py_module()
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as directory:
        path = f"{directory}/index.h5"
        root = create_file(path, 65536)
        group = h5py.h5g.open(root, b"/")
        stamp(group, "hpctrain-ckpt-index")
        set_numbers(group, "world_size", world_size)
        set_text(group, "mesh_dims", ",".join(mesh))
        set_numbers(group, "mesh_shape", list(mesh.values()))
        layout = subgroup(root, "layout")
        for name, rows in _arrays(tables).items():
            made = dataset(layout, name, h5py.h5t.py_create(rows.dtype), rows.shape)
            if len(rows):
                made.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)
        mappings = _mappings(tables)
        virtual = sum(map(len, mappings)) <= MAX_MAPPINGS and len(tables.files) <= MAX_SOURCES
        set_numbers(group, "vds", int(virtual))
        if virtual:
            tensors = subgroup(root, "tensors")
            for tensor, found in zip(tables.tensors, mappings, strict=True):
                _virtual(tensors, tensor, found)
        save = subgroup(root, "save")
        step = dataset(save, "step", h5py.h5t.STD_I64LE, ()).get_offset()
        save_id = dataset(save, "id", h5py.h5t.STD_U8LE, (16,)).get_offset()
        root.close()
        with Path(path).open("rb") as file:
            return IndexTemplate(file.read(), step, save_id)


def _arrays(tables: Tables) -> dict[str, np.ndarray[Any, Any]]:
    """The tables as structured arrays, little-endian, with fixed-length UTF-8 text."""

    def text(values: Sequence[str]) -> str:
        return f"S{max([1, *(len(value.encode()) for value in values)])}"

    dims = (MAX_DIMS,)
    kinds = {
        "files": [("name", text([f.name for f in tables.files])), ("size", "<u8"), ("data_start", "<u8"),
                  ("tail_start", "<u8"), ("hash_offset", "<u8"), ("num_hashes", "<u4")],
        "tensors": [("name", text([t.name for t in tables.tensors])), ("dtype", "S16"),
                    ("role", text([t.role for t in tables.tensors])), ("ndim", "u1"), ("shape", "<i8", dims)],
        "pieces": [("tensor", "<u4"), ("file", "<u4"), ("kind", "u1"), ("start", "<i8", dims), ("count", "<i8", dims),
                   ("offset", "<u8"), ("nbytes", "<u8"), ("hash_row", "<u4")],
        "rank_state": [("rank", "<u4"), ("name", text([s.name for s in tables.states])), ("file", "<u4"),
                       ("offset", "<u8"), ("nbytes", "<u8"), ("hash_row", "<u4")],
    }  # fmt: skip
    pad = (0,) * (MAX_DIMS - 1)
    rows: dict[str, list[tuple[Any, ...]]] = {
        "files": [(f.name.encode(), *f[1:]) for f in tables.files],
        "tensors": [
            (t.name.encode(), t.dtype.encode(), t.role.encode(), len(t.shape),
             (*t.shape, *(0,) * (MAX_DIMS - len(t.shape))))
            for t in tables.tensors
        ],
        "pieces": [
            (p.tensor, p.file, _FLAT, (p.start, *pad), (p.stop - p.start, *pad), p.offset, p.num_bytes, p.hash_row)
            for p in tables.pieces
        ],
        "rank_state": [(s.rank, s.name.encode(), *s[2:]) for s in tables.states],
    }  # fmt: skip
    return {name: np.array(rows[name], dtype=kinds[name]) for name in kinds}  # type: ignore[call-overload]


def _mappings(tables: Tables) -> list[list[tuple[Any, int, str, str, int]]]:
    """For every tensor its (box, first element in the source, file, dataset, elements of the dataset)."""
    found: list[list[tuple[Any, int, str, str, int]]] = [[] for _ in tables.tensors]
    order = sorted(tables.pieces, key=lambda p: (p.file, p.tensor, p.start))
    seen: dict[tuple[int, int], int] = {}
    for piece in order:
        tensor = tables.tensors[piece.tensor]
        repeat = seen[piece.file, piece.tensor] = seen.get((piece.file, piece.tensor), -1) + 1
        source = f"/data/{link_name(tensor.name)}" + (f"#{repeat}" if repeat else "")
        at = 0
        for box in range_boxes(tensor.shape, piece.start, piece.stop):
            found[piece.tensor].append((box, at, tables.files[piece.file].name, source, piece.stop - piece.start))
            at += volume(box)
    return found


def _virtual(parent: Any, tensor: TensorSpec, mappings: Sequence[tuple[Any, int, str, str, int]]) -> None:
    """One virtual dataset of the whole tensor; a plain one where there is nothing to show."""
    h5py = h5py_module()
    shape = tensor.shape or (1,)  # HDF5 has no virtual scalars; the attribute `shape` tells the truth
    name = link_name(tensor.name)
    if mappings:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.VIRTUAL)
        creation.set_fill_value(fill_value(tensor.dtype))
        creation.set_obj_track_times(False)
        space = h5py.h5s.create_simple(shape)
        for box, at, file, source, count in mappings:
            box = box or ((0, 1),)
            target = h5py.h5s.create_simple(shape)
            target.select_hyperslab(tuple(start for start, _ in box), extents(box))
            flat = h5py.h5s.create_simple((count,))
            flat.select_hyperslab((at,), (volume(box),))
            pattern = source.replace("%", "%%")  # HDF5 reads a single one as a placeholder
            creation.set_virtual(target, file.encode(), pattern.encode(), flat)
        made = h5py.h5d.create(parent, name.encode(), type_of(tensor.dtype), space, creation)
    else:
        made = dataset(parent, name, type_of(tensor.dtype), shape)
    set_text(made, "dtype", tensor.dtype)
    set_text(made, "role", tensor.role)
    set_numbers(made, "shape", tensor.shape)


def parse_index(data: bytes) -> tuple[Tables, int, str]:
    """(tables, step, save id in hex) of the bytes of an index file. Local.

    Raises CheckpointError when they are not an index of a version that is known here.
    """
    h5py = h5py_module()
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            rows = {name: file["layout"][name][()] for name in ("files", "tensors", "pieces", "rank_state")}
            step, save_id = int(file["save/step"][()]), file["save/id"][()].tobytes().hex()
    except (OSError, KeyError) as error:
        raise CheckpointError(f"the index cannot be read: {error}") from error
    if any(kind != _FLAT for kind in rows["pieces"]["kind"].tolist()):
        raise CheckpointError("the index has pieces of a kind that this version of hpctrain does not know")
    tensors = tuple(
        TensorSpec(name.decode(), dtype.decode(), tuple(shape[:ndim]), role.decode())
        for name, dtype, role, ndim, shape in _columns(rows["tensors"])
    )
    files = tuple(FileRow(name.decode(), *rest) for name, *rest in _columns(rows["files"]))
    pieces = tuple(
        PieceRow(tensor, file, start[0], start[0] + count[0], offset, num_bytes, hash_row)
        for tensor, file, _, start, count, offset, num_bytes, hash_row in _columns(rows["pieces"])
    )
    states = tuple(StateRow(rank, name.decode(), *rest) for rank, name, *rest in _columns(rows["rank_state"]))
    return Tables(tensors, files, pieces, states), step, save_id


def _columns(rows: np.ndarray[Any, Any]) -> Any:
    """The rows as tuples of Python values."""
    return zip(*(rows[name].tolist() for name in rows.dtype.names or ()), strict=True)
