"""Retention: which old checkpoints are deleted once a new one is safe.

Runs only after a commit, so there is always the new one. Age is the order of saving (the manifest's sequence number),
not the step: after a return to an earlier step the new steps are smaller than the stale ones. Directories that this
version does not understand are left alone. Knows nothing of ranks: rank 0 alone runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpctrain.checkpoint.manifest import parse_manifest
from hpctrain.checkpoint.schema import LATEST, LEFTOVERS, MANIFEST, step_of
from hpctrain.checkpoint.system import System, read_file, remove_tree
from hpctrain.errors import CheckpointError

__all__ = ["Entry", "delete_old", "entries", "next_sequence", "pointed_to"]


class Entry(NamedTuple):
    """One directory of a root that has a checkpoint's name; `manifest` is None (and `fault` says why) if unreadable."""

    name: str
    manifest: dict[str, Any] | None
    fault: str

    @property
    def age(self) -> tuple[int, tuple[int, int]]:
        """Sorts by order of saving; unreadable ones first, by step."""
        return self.manifest["sequence"] if self.manifest else -1, step_of(self.name) or (0, 0)


def entries(root: str, system: System) -> list[Entry]:
    """All checkpoints of `root`, newest first. Local; raises OSError (FileNotFoundError when there is no root)."""
    found = []
    for name in system.listdir(root):
        if step_of(name) is None:
            continue
        try:
            found.append(Entry(name, parse_manifest(read_file(f"{root}/{name}/{MANIFEST}", system)), ""))
        except (OSError, CheckpointError) as error:
            found.append(Entry(name, None, str(error)))
    return sorted(found, key=lambda entry: entry.age, reverse=True)


def pointed_to(root: str, system: System) -> str | None:
    """The name in `latest`, None when there is no such file or it holds no checkpoint's name. Local."""
    try:
        name = read_file(f"{root}/{LATEST}", system).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return name if step_of(name) else None


def next_sequence(found: Sequence[Entry]) -> int:
    """The sequence number of the next save."""
    return 1 + max((entry.manifest["sequence"] for entry in found if entry.manifest), default=0)


def _has_all_files(root: str, entry: Entry, system: System) -> bool:
    assert entry.manifest is not None
    try:
        sizes = {path: system.stat(f"{root}/{entry.name}/{path}").st_size for path in entry.manifest["files"]}
    except OSError:
        return False
    return all(sizes[path] == size for path, (size, _) in entry.manifest["files"].items())


def delete_old(root: str, committed: str, keep: int, system: System) -> None:
    """Deletes all but the `keep` newest whole checkpoints, `committed` always among the kept. Local; OSError."""
    assert keep >= 1, keep
    kept = 1
    for entry in entries(root, system):
        if entry.name == committed or entry.manifest is None:
            continue
        if kept < keep and _has_all_files(root, entry, system):
            kept += 1
            continue
        if kept < keep:  # damaged, and still among the newest: somebody may want to look at it
            continue
        trash = f"{root}/{LEFTOVERS[1]}{entry.name}"
        system.rename(f"{root}/{entry.name}", trash)  # so that no half-deleted one has a checkpoint's name
        remove_tree(trash, system)
