"""The few ways in which checkpoints touch a file system, on an object with the functions of `os`.

Every function takes `system`: the module `os`, or an object with the same functions (open, close, pread, preadv,
pwritev, fsync, stat, listdir, mkdir, rename, unlink, rmdir). A test passes a simulated one and lets it crash.
Knows nothing of the format.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["exists", "make_directory", "open_new", "read_exactly", "read_file", "remove_tree", "sync_directory",
           "write_file", "write_vectors"]  # fmt: skip

System = Any
_MAX_VECTORS = 512  # below IOV_MAX, which is 1024 on Linux


def exists(path: str, system: System) -> bool:
    """Whether something is at `path`. Local."""
    try:
        system.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_exactly(descriptor: int, offset: int, target: memoryview, system: System) -> None:
    """Fills `target` (bytes) from `offset` on. Raises EOFError when the file ends before. Local."""
    done = 0
    while done < len(target):
        count = system.preadv(descriptor, [target[done:]], offset + done)
        if not count:
            raise EOFError(f"the file ends at byte {offset + done}, {len(target) - done} bytes too early")
        done += count


def read_file(path: str, system: System) -> bytes:
    """The whole content of a (small) file. Local."""
    descriptor = system.open(path, os.O_RDONLY)
    try:
        parts = []
        offset = 0
        while part := system.pread(descriptor, 1 << 24, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)
    finally:
        system.close(descriptor)


def open_new(path: str, system: System, *, patience: float = 0.0) -> int:
    """Opens a file anew for writing; waits up to `patience` seconds for a directory that another client made. Local.

    Network file systems show a new directory to other clients only after a while.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return int(system.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def write_vectors(descriptor: int, offset: int, vectors: Sequence[memoryview], system: System) -> int:
    """Writes byte views one after the other from `offset` on; returns the offset behind them. Local.

    Large or interrupted writes come back short from the kernel; the rest is then written by the next call.
    """
    waiting = [view for view in vectors if len(view)]
    first = 0
    while first < len(waiting):
        count = system.pwritev(descriptor, waiting[first : first + _MAX_VECTORS], offset)
        offset += count
        while first < len(waiting) and count >= len(waiting[first]):
            count -= len(waiting[first])
            first += 1
        if count:
            waiting[first] = waiting[first][count:]
    return offset


def write_file(path: str, data: bytes, system: System) -> None:
    """Makes a file with this content and waits until the device has it (its name needs `sync_directory`). Local."""
    descriptor = open_new(path, system)
    try:
        write_vectors(descriptor, 0, [memoryview(data)], system)
        system.fsync(descriptor)
    finally:
        system.close(descriptor)


def sync_directory(path: str, system: System) -> None:
    """Waits until the device has the names in this directory. Local."""
    descriptor = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call and need none
            raise
    finally:
        system.close(descriptor)


def make_directory(path: str, system: System) -> None:
    """Makes a directory, with its parents, and makes their names durable; fine if it is there. Local."""
    if exists(path, system):
        return
    parent = str(Path(path).parent)
    if parent != path:
        make_directory(parent, system)
    try:
        system.mkdir(path)
    except FileExistsError:
        return
    sync_directory(parent, system)


def remove_tree(path: str, system: System) -> None:
    """Removes a file or a directory with all that is in it; symbolic links are not followed. Local."""
    try:
        is_directory = stat.S_ISDIR(system.lstat(path).st_mode)
        if not is_directory:
            system.unlink(path)
            return
        for name in system.listdir(path):
            remove_tree(f"{path}/{name}", system)
        system.rmdir(path)
    except FileNotFoundError:
        return
