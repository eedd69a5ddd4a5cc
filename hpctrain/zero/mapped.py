"""A file without a name whose parts are mapped into memory, and the calls that move its pages.

                  map      read             change            write_out                  drop
    disk          zeros    ------------>                      <------------- changed pages
    memory                 pages in use     changed pages     clean pages                nothing

Owns the file. The system would do all of this by itself at some time; these calls say when. Must not know what the
pages hold. The file has no name from the start on, so nothing is left of it, however the process ends; its blocks are
reserved when a part is mapped, so that a full disk is an error then and not a crash in the middle of an update.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

from hpctrain.errors import ConfigError

__all__ = ["Extent", "MappedFile"]

PAGE = mmap.ALLOCATIONGRANULARITY
_LIBC = ctypes.CDLL(None, use_errno=True)
_WILLNEED, _DONTNEED, _POPULATE_READ = 3, 4, 22  # madvise; the last one since Linux 5.14
_WRITE_AND_WAIT = 1 | 2 | 4  # sync_file_range


class Extent(NamedTuple):
    """Whole pages: where they are mapped, where they lie in the file, bytes."""

    address: int
    offset: int
    num_bytes: int


class MappedFile:
    """One process's file in `directory`. All calls are local and may come from any thread.

    Raises ConfigError if no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._file = _nameless(directory)
        except OSError as error:
            raise ConfigError(f"zero.offload.directory = {str(directory)!r} cannot be used: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)
        self.num_bytes = 0

    def map(self, num_bytes: int, title: str) -> tuple[memoryview, Extent]:
        """`num_bytes` > 0 more of zeros and their pages. Raises ConfigError, saying what is missing, on a full disk."""
        size = -(-num_bytes // PAGE) * PAGE
        try:
            os.posix_fallocate(self._file, self.num_bytes, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self._directory).free
            raise ConfigError(f"zero.offload.directory = {str(self._directory)!r} is full: {title} needs {size} bytes "
                              f"besides the {self.num_bytes} that this rank has there; {free} are free "
                              f"({error.strerror})") from None
        memory = mmap.mmap(self._file, size, offset=self.num_bytes)
        first = ctypes.c_char.from_buffer(memory)
        extent = Extent(ctypes.addressof(first), self.num_bytes, size)
        self.num_bytes += size
        return memoryview(memory)[:num_bytes], extent

    def read(self, extent: Extent) -> None:
        """Blocks until the pages are in memory."""
        if _LIBC.madvise(*_place(extent), _POPULATE_READ):
            _LIBC.madvise(*_place(extent), _WILLNEED)

    def write_out(self, extent: Extent) -> None:
        """Blocks until what was changed is on its way to the disk and the pages are clean. Raises OSError."""
        number, (_, offset, size) = self._file, extent
        if not hasattr(_LIBC, "sync_file_range"):
            os.fsync(number)
        elif _LIBC.sync_file_range(number, ctypes.c_int64(offset), ctypes.c_int64(size), _WRITE_AND_WAIT):
            code = ctypes.get_errno()
            raise OSError(code, f"offload to {self._directory}: {os.strerror(code)}")

    def drop(self, extent: Extent) -> None:
        """Clean pages leave memory; changed ones stay."""
        _LIBC.madvise(*_place(extent), _DONTNEED)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, extent.offset, extent.num_bytes, os.POSIX_FADV_DONTNEED)


def _nameless(directory: Path) -> int:
    """A new file of `directory` without a name, as a descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (AttributeError, OSError) as error:  # not every file system can
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(dir=directory)
    Path(path).unlink()
    return descriptor


def _place(extent: Extent) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(extent.address), ctypes.c_size_t(extent.num_bytes)
