"""The offline check of a checkpoint: every byte, one process, no MPI.

Owns the list of faults that `hpctrain ckpt verify` prints. Knows nothing of terminals.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hpctrain.checkpoint.layout import check_coverage
from hpctrain.checkpoint.schema import SHARDS
from hpctrain.checkpoint.system import System
from hpctrain.checkpoint.validate import bind_tables, blob_faults, file_faults, read_record
from hpctrain.errors import CheckpointError

__all__ = ["faults", "remarks"]


def faults(directory: str, system: System = os) -> list[str]:
    """All that is wrong with the checkpoint in `directory`, one line each; empty when it is whole. Local."""
    try:
        record = read_record(directory, system)
        tables = bind_tables(record)
        check_coverage(tables)
    except (OSError, CheckpointError) as error:
        return [str(error)]
    found = file_faults(directory, record, tables, range(len(tables.files)), system)
    if not found:
        found = blob_faults(directory, record, tables, [*tables.pieces, *tables.states], system)
    try:
        known = {Path(file.name).name for file in tables.files}
        found += [
            f"{SHARDS}/{name} does not belong to this checkpoint"
            for name in sorted(system.listdir(f"{directory}/{SHARDS}"))
            if name not in known
        ]
    except OSError as error:
        found.append(str(error))
    return found


def remarks(directory: str, system: System = os) -> list[str]:
    """What is not wrong, and still good to know before the checkpoint is read through other tools. Local."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_files = len(read_record(directory, system).manifest["files"])
    if limit == resource.RLIM_INFINITY or num_files < limit - 32:
        return []
    return [
        f"index.h5 spans {num_files} files, and this process may open {limit}: HDF5 would show fill values for the "
        "rest, with no error. Raise the limit (ulimit -n) before reading through index.h5"
    ]
