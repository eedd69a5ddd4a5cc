"""The words of the format: what a tensor, a piece and a want are, and the rows of the layout tables.

Owns the records and the names of files and directories. Knows neither HDF5 nor a file system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from hpctrain.checkpoint.hdf5_types import item_bytes
from hpctrain.errors import CheckpointError
from hpctrain.plan.boxes import volume
from hpctrain.plan.placement import Box

__all__ = [
    "FORMAT", "INDEX", "LATEST", "LEFTOVERS", "MANIFEST", "MAX_DIMS", "SHARDS", "VERSION",
    "FileRow", "Piece", "PieceRow", "StateRow", "Tables", "TensorSpec", "Want",
    "link_name", "shard_name", "step_name", "step_of",
]  # fmt: skip

FORMAT = "hpctrain-ckpt"
VERSION = 1
MANIFEST, INDEX, SHARDS, LATEST = "manifest.json", "index.h5", "shards", "latest"
LEFTOVERS = (".tmp-", ".trash-", ".latest-")  # what a killed save or clean-up leaves; removed by the next save
MAX_DIMS = 8  # the width of the shape column


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor of the checkpoint. `name` is unique in a checkpoint, `shape` is global.

    `role` says what it is for: "param", "exp_avg", "exp_avg_sq", "momentum", "buffer".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.count * item_bytes(self.dtype)


@dataclass(frozen=True)
class Piece:
    """What one rank writes of one tensor: the elements [start, stop) in C order; `memory` holds exactly their bytes.

    A rank may give none, and several of one tensor. An empty piece only announces its tensor.
    """

    tensor: TensorSpec
    start: int
    stop: int
    memory: memoryview


@dataclass(frozen=True)
class Want:
    """What one rank reads of one tensor into `memory` (writable, C-contiguous): a flat range, or a box (`Want.box`)."""

    name: str
    start: int
    stop: int
    memory: memoryview
    region: Box | None = field(default=None)

    @classmethod
    def box(cls, name: str, box: Box, memory: memoryview) -> Want:
        """The box of the tensor, laid out in `memory` in the box's own C order."""
        return cls(name, 0, volume(box), memory, box)


class FileRow(NamedTuple):
    """One shard file: its head is [0, data_start), its tail [tail_start, size); the hash table lies in the tail."""

    name: str
    size: int
    data_start: int
    tail_start: int
    hash_offset: int
    num_hashes: int


class PieceRow(NamedTuple):
    """Where the elements [start, stop) of tensor number `tensor` lie."""

    tensor: int
    file: int
    start: int
    stop: int
    offset: int
    num_bytes: int
    hash_row: int


class StateRow(NamedTuple):
    """Where the named bytes of one rank lie."""

    rank: int
    name: str
    file: int
    offset: int
    num_bytes: int
    hash_row: int


@dataclass(frozen=True)
class Tables:
    """The layout of a checkpoint: where everything is. The same for every save with the same layout."""

    tensors: tuple[TensorSpec, ...]
    files: tuple[FileRow, ...]
    pieces: tuple[PieceRow, ...]
    states: tuple[StateRow, ...]


def link_name(name: str) -> str:
    """The HDF5 link of a tensor: its name, with the characters that HDF5 or this format reserve as %XX."""
    if not name or "\0" in name:
        raise CheckpointError(f"tensor name {name!r} must not be empty or hold a NUL character")
    escaped = name.replace("%", "%25").replace("/", "%2F").replace("#", "%23")
    return "%2E" if escaped == "." else escaped


def shard_name(file: int) -> str:
    """Path of a shard file within its checkpoint."""
    return f"{SHARDS}/f{file:05d}.h5"


def step_name(step: int, attempt: int = 1) -> str:
    """Directory of a step; a step that is saved again gets a further name, so that nothing whole is overwritten."""
    return f"step-{step:010d}" + (f".{attempt}" if attempt > 1 else "")


def step_of(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's directory name, None for any other name."""
    match = re.fullmatch(r"step-(\d{10,})(?:\.(\d+))?", name)
    return (int(match[1]), int(match[2] or 1)) if match else None
