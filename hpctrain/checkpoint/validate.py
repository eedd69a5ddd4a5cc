"""Whether a checkpoint is whole, as far as one process looks: the manifest and the index, files, pieces.

Owns the checks that loading and `hpctrain ckpt verify` share. Knows nothing of ranks; callers share out the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_hexdigest

from hpctrain.checkpoint.index import parse_index
from hpctrain.checkpoint.manifest import parse_manifest
from hpctrain.checkpoint.schema import INDEX, MANIFEST, PieceRow, StateRow, Tables
from hpctrain.checkpoint.shard import read_hashes
from hpctrain.checkpoint.system import System, read_exactly, read_file
from hpctrain.errors import CheckpointError

__all__ = ["Record", "bind_tables", "blob_faults", "blob_name", "file_faults", "read_record"]

_BLOCK = 4 << 20  # bytes of a blob in memory at a time


class Record(NamedTuple):
    """The manifest of a checkpoint and the bytes of its index, whose hash is right."""

    manifest: dict[str, Any]
    index_bytes: bytes


def read_record(directory: str, system: System) -> Record:
    """Reads and checks manifest and index. Local. Raises CheckpointError with the reason, OSError for lost files."""
    manifest = parse_manifest(read_file(f"{directory}/{MANIFEST}", system))
    index = read_file(f"{directory}/{INDEX}", system)
    size, digest = manifest["index"]
    if len(index) != size:
        raise CheckpointError(f"{INDEX} has {len(index)} bytes, not {size}")
    if xxh3_128_hexdigest(index) != digest:
        raise CheckpointError(f"the checksum of {INDEX} is wrong")
    return Record(manifest, index)


def bind_tables(record: Record) -> Tables:
    """The tables of the index, after a check that index and manifest belong together. Local; CheckpointError."""
    tables, step, save_id = parse_index(record.index_bytes)
    manifest = record.manifest
    if (step, save_id) != (manifest["step"], manifest["save_id"]):
        raise CheckpointError(f"{INDEX} is of another save (step {step}) than the manifest (step {manifest['step']})")
    if {file.name: file.size for file in tables.files} != {n: size for n, (size, _) in manifest["files"].items()}:
        raise CheckpointError(f"{INDEX} and the manifest name different files")
    return tables


def file_faults(directory: str, record: Record, tables: Tables, numbers: Iterable[int], system: System) -> list[str]:
    """What is wrong with the files of these numbers: missing, of a wrong size, damaged in their header. Local."""
    faults = []
    for number in numbers:
        file = tables.files[number]
        try:
            read_hashes(directory, file, record.manifest["files"][file.name][1], system)
        except (OSError, CheckpointError) as error:
            faults.append(str(error))
    return faults


def blob_name(tables: Tables, row: PieceRow | StateRow) -> str:
    """How messages call a blob."""
    if isinstance(row, StateRow):
        return f"state {row.name!r} of rank {row.rank}"
    return f"tensor {tables.tensors[row.tensor].name!r}, elements [{row.start}, {row.stop})"


def blob_faults(
    directory: str, record: Record, tables: Tables, rows: Iterable[PieceRow | StateRow], system: System
) -> list[str]:
    """Which of these pieces and states are damaged, by reading all of their bytes. Local."""
    faults = []
    buffer = memoryview(bytearray(_BLOCK))
    by_file: dict[int, list[PieceRow | StateRow]] = {}
    for row in rows:
        if row.num_bytes:
            by_file.setdefault(row.file, []).append(row)
    for number, wanted in sorted(by_file.items()):
        file = tables.files[number]
        try:
            hashes = read_hashes(directory, file, record.manifest["files"][file.name][1], system)
            descriptor = system.open(f"{directory}/{file.name}", os.O_RDONLY)
        except (OSError, CheckpointError) as error:
            faults.append(str(error))
            continue
        try:
            for row in sorted(wanted, key=lambda row: row.offset):
                digest = xxh3_128()
                for at in range(0, row.num_bytes, _BLOCK):
                    part = buffer[: min(_BLOCK, row.num_bytes - at)]
                    read_exactly(descriptor, row.offset + at, part, system)
                    digest.update(part)
                if digest.digest()[::-1] != hashes[row.hash_row]:
                    faults.append(f"{file.name}: {blob_name(tables, row)}: the checksum is wrong")
        except (OSError, EOFError) as error:
            faults.append(f"{file.name}: {error}")
        finally:
            system.close(descriptor)
    return faults
