"""The manifest: the commit record of a checkpoint. Only a directory with a right one is a checkpoint.

    {                                  <- body: JSON, keys in a fixed order
     "algo": "xxh3_128",
     ...
    }
    0f3c...                            <- last line: xxh3_128 of the body, in hex

Owns its text form. Knows neither HDF5 nor ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from xxhash import xxh3_128_hexdigest

from hpctrain.checkpoint.schema import FORMAT, INDEX, SHARDS, VERSION
from hpctrain.errors import CheckpointError

__all__ = ["check_json", "make_manifest", "parse_manifest"]

_KEYS = {"algo": str, "env": dict, "files": dict, "index": list, "mesh": dict, "save_id": str, "sequence": int,
         "step": int, "time": str, "user": dict, "world_size": int}  # fmt: skip


def check_json(name: str, value: Any) -> None:
    """Refuses what JSON cannot hold. Raises CheckpointError that names the argument. Local."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} = {value!r} must be a dict")
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} must hold only what JSON can: {error}") from error


def make_manifest(
    facts: Mapping[str, Any], files: Mapping[str, Sequence[Any]], index: bytes, mesh: Mapping[str, int]
) -> bytes:
    """The manifest's bytes.

    Args:
        facts: save_id, sequence, step, world_size, user, env.
        files: {path: [bytes, root hash]} of the shards.
        index: the bytes of the index file.
        mesh: {axis: length}, slowest first.
    """
    body = {
        **facts,
        "algo": "xxh3_128",
        "files": {path: list(entry) for path, entry in files.items()},
        "format": FORMAT,
        "format_version": VERSION,
        "index": [len(index), xxh3_128_hexdigest(index)],
        "mesh": {"dims": list(mesh), "shape": list(mesh.values())},  # a JSON object would not keep their order
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()
    return text + f"{xxh3_128_hexdigest(text)}\n".encode()


def parse_manifest(data: bytes) -> dict[str, Any]:
    """The body of a manifest. Raises CheckpointError that says what is wrong with it. Local."""
    body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    if not data.endswith(b"\n") or xxh3_128_hexdigest(body + b"\n").encode() != last:
        raise CheckpointError("the manifest's checksum is wrong (it is damaged or was not written to its end)")
    try:
        manifest = json.loads(body)
    except ValueError as error:
        raise CheckpointError(f"the manifest is not JSON: {error}") from error
    name, version = (manifest.get("format"), manifest.get("format_version")) if isinstance(manifest, dict) else (0, 0)
    if name != FORMAT or version != VERSION:
        raise CheckpointError(f"format {name!r} version {version!r} is not known here; legal is {FORMAT!r} {VERSION}")
    for key, kind in _KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"the manifest's {key!r} is missing or of a wrong type")
    if any(not path.startswith(f"{SHARDS}/") or ".." in path for path in manifest["files"]):
        raise CheckpointError(f"the manifest names files outside of {SHARDS}/ and {INDEX}")
    return manifest
