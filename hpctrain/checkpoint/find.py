"""Which checkpoint to load: a decision of all ranks together, on what each of them has checked.

    rank 0:     candidates: the one `latest` names, then all others, newest first
    for each:   rank 0 reads manifest and index, all get them (one read for the whole job);
                every rank checks its share of files and bytes; all hear all faults
    first one without a fault wins; each one passed over is named with its reason

Owns the search and the fall-back. Collective over the group; only rank 0 warns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.hdf5_types import h5py_module
from hpctrain.checkpoint.keep import entries, pointed_to
from hpctrain.checkpoint.read import Checkpoint
from hpctrain.checkpoint.schema import MANIFEST, PieceRow, StateRow, Tables, step_of
from hpctrain.checkpoint.system import System, exists
from hpctrain.checkpoint.together import agreed, on_root
from hpctrain.checkpoint.validate import Record, bind_tables, blob_faults, file_faults, read_record
from hpctrain.errors import CheckpointError, ConfigError, choices

if TYPE_CHECKING:
    from hpctrain.collectives import Group

__all__ = ["find"]

_LEVELS = ("full", "quick")


def find(
    root_or_path: str | os.PathLike[str],
    group: Group,
    *,
    must_exist: bool,
    check: str = "full",
    system: System = os,
) -> Checkpoint | None:
    """The newest whole checkpoint of a root, or the one that is named. Collective over the group.

    Args:
        root_or_path: a root directory, or one checkpoint in it (then nothing else is tried).
        must_exist: whether a root without any checkpoint is an error, or gives None.
        check: "full" reads every byte once, shared out over the ranks, so that any damage leads to an older one;
            "quick" checks manifest, index, file sizes and headers, and leaves tensors to the reads.

    Raises CheckpointError on all ranks alike, when a named one is damaged, or a root has some and all are damaged:
    to start anew is then a decision for a person.
    """
    if check not in _LEVELS:
        raise ConfigError(f"check = {check!r} is not legal; legal are {choices(_LEVELS)}")
    path = str(Path(root_or_path).absolute())
    found = on_root(group, lambda: _candidates(path, system))
    directories, named, complaints = found["directories"], found["named"], found["complaints"]
    if directories:
        with agreed(group):
            h5py_module()
    for directory in directories:
        checkpoint, fault = _try(directory, group, check, system)
        if checkpoint is not None:
            if complaints and group.rank == 0:
                passed = "\n  ".join(complaints)
                warnings.warn(f"using checkpoint {directory}, because:\n  {passed}", stacklevel=2)
            return checkpoint
        if named:
            raise CheckpointError(f"checkpoint {directory} cannot be used: {fault}")
        complaints.append(f"{directory} cannot be used: {fault}")
    if directories or complaints:
        listed = "\n  ".join(complaints)
        raise CheckpointError(
            f"{path} has checkpoints, and none can be used; name a good one, or move them away to start anew:"
            f"\n  {listed}"
        )
    if must_exist:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return None


def _candidates(path: str, system: System) -> dict[str, Any]:
    """Rank 0: where to look, best first, and what is odd already."""
    name = Path(path).name
    if step_of(name) is not None or exists(f"{path}/{MANIFEST}", system):
        return {"directories": [path], "named": True, "complaints": []}
    try:
        names = [entry.name for entry in entries(path, system)]
    except FileNotFoundError:
        return {"directories": [], "named": False, "complaints": []}
    latest, complaints = pointed_to(path, system), []
    if latest is not None and latest not in names:
        complaints.append(f"{path}/latest names {latest}, which is not there")
    names.sort(key=lambda name: name != latest)  # stable: the others stay newest first
    return {"directories": [f"{path}/{n}" for n in names], "named": False, "complaints": complaints}


def _try(directory: str, group: Group, check: str, system: System) -> tuple[Checkpoint | None, str]:
    """The checkpoint in `directory`, or None and the reason, the same on all ranks."""
    record = Record({}, b"")

    def load() -> dict[str, Any]:
        nonlocal record
        try:
            record = read_record(directory, system)
        except (OSError, CheckpointError) as error:
            return {"fault": str(error), "manifest": None, "bytes": 0}
        return {"fault": "", "manifest": record.manifest, "bytes": len(record.index_bytes)}

    told = on_root(group, load)
    if told["manifest"] is None:
        return None, told["fault"]
    index = np.frombuffer(record.index_bytes, np.uint8).copy() if group.rank == 0 else np.empty(told["bytes"], np.uint8)
    group.broadcast(index)
    record = Record(told["manifest"], index.tobytes())

    faults: list[str] = []
    tables = Tables((), (), (), ())
    try:
        tables = bind_tables(record)
    except CheckpointError as error:
        faults.append(str(error))
    if not faults:
        mine = range(group.rank, len(tables.files), group.size)
        faults += file_faults(directory, record, tables, mine, system)
    if not faults and check == "full":
        share = _share([*tables.pieces, *tables.states], group.rank, group.size)
        faults += blob_faults(directory, record, tables, share, system)
    everybody = [fault for told in group.exchange(faults[:3]) for fault in told]
    if everybody:
        return None, "; ".join(dict.fromkeys(everybody))
    return Checkpoint(Path(directory), record, tables, system), ""


def _share(rows: Sequence[PieceRow | StateRow], rank: int, size: int) -> list[PieceRow | StateRow]:
    """The rows whose middle byte falls into this rank's part of all bytes: about equal work, each row once."""
    rows = sorted(rows, key=lambda row: (row.file, row.offset))
    total, at, mine = sum(row.num_bytes for row in rows), 0, []
    for row in rows:
        if (2 * at + row.num_bytes) * size // max(1, 2 * total) == rank:
            mine.append(row)
        at += row.num_bytes
    return mine
