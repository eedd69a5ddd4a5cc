"""One shard file as bytes: header, blobs at their offsets, hashes; written raw and read raw.

Owns the data path. No HDF5 call is made here; what HDF5 needs is in the template's bytes. Knows nothing of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from xxhash import xxh3_128, xxh3_128_digest

from hpctrain.checkpoint.schema import FileRow
from hpctrain.checkpoint.system import System, open_new, read_exactly, write_vectors
from hpctrain.checkpoint.template import Template
from hpctrain.errors import CheckpointError

__all__ = ["blob_hash", "read_hashes", "write_shard"]

_BLOCK = 64 << 20  # bytes handed to the kernel in one call
_PATIENCE = 30.0  # seconds until another client must see a directory that rank 0 made


def blob_hash(blob: memoryview) -> bytes:
    """The xxh3_128 of a blob as it stands in /check/hash: low half, high half, each a little-endian uint64."""
    return xxh3_128_digest(blob)[::-1]  # the digest itself is big-endian


def write_shard(
    path: str, template: Template, blobs: Sequence[memoryview], step: int, save_id: str, system: System
) -> str:
    """Writes a shard file and waits until the device has it; returns its root hash. Local; raises OSError.

    Args:
        blobs: the bytes of pieces and states, in the order in which the template was built from them.
        save_id: 16 bytes in hex.
    """
    rows = zip(template.offsets, template.hash_rows, blobs, strict=True)
    placed = sorted((offset, row, i) for i, (offset, row, blob) in enumerate(rows) if len(blob))
    start, tail = template.tail_start, bytearray(template.size - template.tail_start)
    patches = [(template.step_offset, step.to_bytes(8, "little")), (template.id_offset, bytes.fromhex(save_id))]
    patches += [(template.hash_offset + 16 * row, blob_hash(blobs[i])) for _, row, i in placed]
    for offset, data in patches:
        tail[offset - start : offset - start + len(data)] = data

    vectors = [(offset, blobs[i]) for offset, _, i in placed]
    vectors = [(0, memoryview(template.head)), *vectors, (start, memoryview(tail))]
    descriptor = open_new(path, system, patience=_PATIENCE)
    try:
        _write_all(descriptor, vectors, system)
        system.fsync(descriptor)
    finally:
        system.close(descriptor)
    root = xxh3_128(template.head)
    root.update(tail)
    return root.hexdigest()


def _write_all(descriptor: int, placed: Sequence[tuple[int, memoryview]], system: System) -> None:
    """Writes the views at their growing offsets, in large calls; zeros go between them."""
    zeros = memoryview(bytes(8192))
    at = begin = 0
    batch: list[memoryview] = []
    for offset, view in placed:
        while at < offset:
            batch.append(zeros[: offset - at])
            at += len(batch[-1])
        batch.append(view)
        at += len(view)
        if at - begin >= _BLOCK:
            begin = write_vectors(descriptor, begin, batch, system)
            batch = []
    write_vectors(descriptor, begin, batch, system)


def read_hashes(directory: str, file: FileRow, root_hash: str, system: System) -> list[bytes]:
    """The hash table of a shard, after a check of size and root hash. Local; OSError.

    Raises CheckpointError that names the file.
    """
    path = f"{directory}/{file.name}"
    size = system.stat(path).st_size
    if size != file.size:
        raise CheckpointError(f"{file.name} has {size} bytes, not {file.size}")
    head, tail = bytearray(file.data_start), bytearray(file.size - file.tail_start)
    descriptor = system.open(path, os.O_RDONLY)
    try:
        read_exactly(descriptor, 0, memoryview(head), system)
        read_exactly(descriptor, file.tail_start, memoryview(tail), system)
    except EOFError as error:
        raise CheckpointError(f"{file.name}: {error}") from error
    finally:
        system.close(descriptor)
    root = xxh3_128(head)
    root.update(tail)
    if root.hexdigest() != root_hash:
        raise CheckpointError(f"{file.name}: the checksum of its header and hash table is wrong")
    begin = file.hash_offset - file.tail_start
    return [bytes(tail[begin + 16 * row : begin + 16 * row + 16]) for row in range(file.num_hashes)]
