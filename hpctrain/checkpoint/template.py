"""The skeleton of a shard file: all of its HDF5 metadata, made once, so that a save is raw bytes at known offsets.

        0          data_start                            tail_start        size
        | head     | piece 0 | piece 1 | ... | rank state | tail            |
          HDF5        page-    each on a 64-byte            /save/step
          metadata    aligned  border                       /save/id
          (static)                                          /check/hash

h5py makes the file sparse in a temporary directory; no tensor byte passes through HDF5. The bytes depend only on the
arguments. Knows nothing of ranks other than the numbers it is given, and nothing of how a save is committed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.hdf5_types import h5py_module, item_bytes, type_of
from hpctrain.checkpoint.schema import FORMAT, VERSION, TensorSpec, link_name
from hpctrain.errors import CheckpointError

__all__ = ["Template", "build_shard", "create_file", "dataset", "set_numbers", "set_text", "stamp",
           "subgroup"]  # fmt: skip

_PAGE = 4096
_ALIGNMENT = 64
_BYTES_OF_HEADER = 16 * _PAGE  # what HDF5 needs for attributes and groups, generously; see build_shard
_BYTES_PER_DATASET = 768  # and for each piece
_MAX_GAP = 2 * 2048  # between datasets: HDF5 takes space for small ones in blocks of 2048 bytes


@dataclass(frozen=True)
class Template:
    """A shard file without its tensors.

    `offsets` are those of the pieces and then the states, in the order given; `hash_rows` their rows in the hash table,
    which goes by offset. Empty ones have no bytes and no row: both are 0.
    """

    head: bytes
    size: int
    tail_start: int
    step_offset: int
    id_offset: int
    hash_offset: int
    offsets: tuple[int, ...]
    hash_rows: tuple[int, ...]
    num_hashes: int


def creator_version() -> str:
    """The version of the installed package, "unknown" when it runs from a bare source tree."""
    try:
        return version("hpctrain")
    except PackageNotFoundError:
        return "unknown"


def create_file(path: str, meta_bytes: int) -> Any:
    """A new HDF5 file (`h5py.h5f.FileID`) whose metadata goes into one block of `meta_bytes` at its start."""
    h5py = h5py_module()
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_alignment(1, _ALIGNMENT)
    access.set_meta_block_size(meta_bytes)
    access.set_file_locking(False, True)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access)


def subgroup(parent: Any, name: str) -> Any:
    """A group without time stamps."""
    h5py = h5py_module()
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    return h5py.h5g.create(parent, name.encode(), gcpl=creation)


def dataset(parent: Any, name: str, hdf5_type: Any, shape: tuple[int, ...]) -> Any:
    """A contiguous dataset whose space is there at once and never filled, without time stamps."""
    h5py = h5py_module()
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    return h5py.h5d.create(parent, name.encode(), hdf5_type, space, creation)


def set_text(target: Any, name: str, text: str) -> None:
    """A fixed-length UTF-8 attribute."""
    h5py = h5py_module()
    data = text.encode() or b"\0"
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(data))
    kind.set_cset(h5py.h5t.CSET_UTF8)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    attribute = h5py.h5a.create(target, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR))
    attribute.write(np.array(data, f"S{len(data)}"), kind)


def set_numbers(target: Any, name: str, numbers: Sequence[int] | int, kind: str = "<i8") -> None:
    """An attribute of integers: a scalar, or one dim (which may be empty)."""
    h5py = h5py_module()
    values = np.array(numbers, kind)
    space = h5py.h5s.create_simple(values.shape) if values.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    attribute = h5py.h5a.create(target, name.encode(), h5py.h5t.py_create(values.dtype), space)
    if values.size:
        attribute.write(values)


def stamp(root: Any, format_name: str) -> None:
    """The attributes that say what a file is and what made it."""
    h5py = h5py_module()
    set_text(root, "format", format_name)
    set_numbers(root, "format_version", VERSION)
    set_text(root, "Conventions", f"{FORMAT}-{VERSION}")
    set_text(root, "creator", "hpctrain")
    set_text(root, "creator_version", creator_version())
    set_text(root, "HDF5_Version", h5py.version.hdf5_version)
    set_text(root, "h5py_version", h5py.version.version)
    set_text(root, "byteorder", "little")


def build_shard(
    file: int, ranges: Sequence[tuple[TensorSpec, int, int]], states: Sequence[tuple[str, int]]
) -> Template:
    """The template of shard number `file`, written by the rank of the same number. Local.

    Args:
        ranges: (tensor, start, stop) of every non-empty piece.
        states: (name, bytes) of the rank's own blobs.
    """
    names = [tensor.name for tensor, _, _ in ranges] + [name for name, _ in states]
    wanted = _BYTES_OF_HEADER + sum(_BYTES_PER_DATASET + 4 * len(name.encode()) for name in names)
    meta_bytes = -(-wanted // _PAGE) * _PAGE
    for _ in range(8):
        with tempfile.TemporaryDirectory(prefix="hpctrain-") as directory:
            path = f"{directory}/skeleton.h5"
            template = _build(path, meta_bytes, file, ranges, states)
        if template is not None:
            return template
        meta_bytes *= 2
    raise CheckpointError(f"HDF5 does not lay out shard {file} in order ({len(names)} pieces)")


def _build(
    path: str,
    meta_bytes: int,
    file: int,
    ranges: Sequence[tuple[TensorSpec, int, int]],
    states: Sequence[tuple[str, int]],
) -> Template | None:
    """One try; None when the metadata did not fit into its block and ended up between the tensors."""
    h5py = h5py_module()
    root = create_file(path, meta_bytes)
    group = h5py.h5g.open(root, b"/")
    stamp(group, "hpctrain-shard")
    set_numbers(group, "file_index", file)
    set_numbers(group, "writer_ranks", [file], "<i4")
    extents = _blobs(root, file, ranges, states)

    byte = h5py.h5t.STD_U8LE
    save, check = subgroup(root, "save"), subgroup(root, "check")
    step = dataset(save, "step", h5py.h5t.STD_I64LE, ()).get_offset()
    save_id = dataset(save, "id", byte, (16,)).get_offset()
    by_offset = sorted((offset, i) for i, (offset, num_bytes) in enumerate(extents) if num_bytes)
    hashes = dataset(check, "hash", h5py.h5t.STD_U64LE, (len(by_offset), 2))
    hash_offset = hashes.get_offset() if by_offset else 0
    root.close()

    size = Path(path).stat().st_size
    tail = [(step, 8), (save_id, 16)] + ([(hash_offset, 16 * len(by_offset))] if by_offset else [])
    stored = [(offset, extents[i][1]) for offset, i in by_offset] + sorted(tail)
    borders = [meta_bytes, *(offset + n for offset, n in stored)], [*(offset for offset, _ in stored), size]
    gaps = [start - stop for stop, start in zip(*borders, strict=True)]
    if min(gaps) < 0 or max(gaps) >= _MAX_GAP:
        return None
    with Path(path).open("rb") as skeleton:
        head = skeleton.read(meta_bytes)
    rows = {i: row for row, (_, i) in enumerate(by_offset)}
    return Template(
        head, size, min(tail)[0], step, save_id, hash_offset,
        tuple(offset for offset, _ in extents), tuple(rows.get(i, 0) for i in range(len(extents))), len(by_offset),
    )  # fmt: skip


def _blobs(
    root: Any, file: int, ranges: Sequence[tuple[TensorSpec, int, int]], states: Sequence[tuple[str, int]]
) -> list[tuple[int, int]]:
    """Creates the datasets of pieces and states; returns their (offset, bytes) in the order given."""
    h5py = h5py_module()
    data, own = subgroup(root, "data"), subgroup(subgroup(root, "rank_state"), str(file))
    extents = []
    seen: dict[str, int] = {}
    for tensor, start, stop in ranges:
        repeat = seen[tensor.name] = seen.get(tensor.name, -1) + 1
        name = link_name(tensor.name) + (f"#{repeat}" if repeat else "")
        made = dataset(data, name, type_of(tensor.dtype), (stop - start,))
        set_text(made, "dtype", tensor.dtype)
        set_numbers(made, "global_shape", tensor.shape)
        set_numbers(made, "flat_range", (start, stop))
        extents.append((made.get_offset(), (stop - start) * item_bytes(tensor.dtype)))
    for name, num_bytes in states:
        made = dataset(own, link_name(name), h5py.h5t.STD_U8LE, (num_bytes,))
        extents.append((made.get_offset() if num_bytes else 0, num_bytes))
    return extents
