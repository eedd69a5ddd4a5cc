"""The commit: the operations, in their order, that turn written shards into the newest checkpoint.

        shards written and synced by all ranks
              |
        write index.h5, write manifest.json          (each: write, fsync, close)
        sync  shards/, tmp/                          names of the files are durable
        rename tmp -> step-N                         now it is a checkpoint
        write .latest-ID, rename it -> latest
        sync  root                                   now it survives a crash: the save may be acknowledged

At every moment a crash leaves the previous checkpoint, or the new one, or both; never half of one under a final name.
The list is data, so a test can run the same list on a file system that forgets, and show what each line is for.
Knows nothing of ranks: rank 0 alone runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.checkpoint.schema import INDEX, LATEST, LEFTOVERS, MANIFEST, SHARDS, step_name, step_of
from hpctrain.checkpoint.system import System, make_directory, remove_tree, sync_directory, write_file

__all__ = ["Operation", "free_name", "operations", "perform", "prepare", "temporary_name"]


@dataclass(frozen=True)
class Operation:
    """One step of the protocol: "write" (durable), "sync" (the names in a directory) or "rename"."""

    action: str
    path: str
    data: bytes = b""
    target: str = ""


def temporary_name(step: int, save_id: str) -> str:
    """The directory of a save in progress."""
    return f"{LEFTOVERS[0]}{step_name(step)}-{save_id}"


def prepare(root: str, temporary: str, system: System) -> None:
    """Makes the directory of a save, and clears away what killed saves left. Local; may wait for the device."""
    make_directory(root, system)
    for name in system.listdir(root):
        if name.startswith(LEFTOVERS):
            remove_tree(f"{root}/{name}", system)
    system.mkdir(f"{root}/{temporary}")
    system.mkdir(f"{root}/{temporary}/{SHARDS}")


def free_name(root: str, step: int, system: System) -> str:
    """A name for a checkpoint of `step` that is not taken: a checkpoint is never overwritten. Local."""
    taken = [place[1] for name in system.listdir(root) if (place := step_of(name)) and place[0] == step]
    return step_name(step, max(taken, default=0) + 1)


def operations(root: str, temporary: str, final: str, index: bytes, manifest: bytes) -> list[Operation]:
    """The commit of `root/temporary` as `root/final`, as data."""
    tmp = f"{root}/{temporary}"
    pointer = f"{root}/{LEFTOVERS[2]}{final}"
    return [
        Operation("write", f"{tmp}/{INDEX}", index),
        Operation("write", f"{tmp}/{MANIFEST}", manifest),
        Operation("sync", f"{tmp}/{SHARDS}"),
        Operation("sync", tmp),
        Operation("rename", tmp, target=f"{root}/{final}"),
        Operation("write", pointer, f"{final}\n".encode()),
        Operation("rename", pointer, target=f"{root}/{LATEST}"),
        Operation("sync", root),
    ]


def perform(todo: Sequence[Operation], system: System) -> None:
    """Runs the operations in order. Raises OSError at the first that fails; the ones before stay done. Local."""
    for operation in todo:
        if operation.action == "write":
            write_file(operation.path, operation.data, system)
        elif operation.action == "sync":
            sync_directory(operation.path, system)
        else:
            assert operation.action == "rename", operation
            system.rename(operation.path, operation.target)
