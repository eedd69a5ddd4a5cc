"""Arrays on disk: zeros, one file without a name, a window that is kept, and words where the disk does not do it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.arrays.torch import TorchArrays
from hpctrain.errors import ConfigError
from hpctrain.optim.home import Span
from hpctrain.zero import mapped
from hpctrain.zero.disk import Disk
from hpctrain.zero.mapped import PAGE, Extent
from hpctrain.zero.offload import Offload

KINDS = ("states", "gradients", "parameters")
CHUNK = 64 * PAGE  # bytes of each array
NUM_CHUNKS = 8


class Told:
    """Counts the pages of a disk that are in memory, by the calls that move them."""

    def __init__(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: dict[int, int] = {}
        self.largest = 0
        self.calls: list[tuple[str, int]] = []
        for name in ("read", "write_out", "drop"):
            monkeypatch.setattr(disk._file, name, self._wrap(name, getattr(disk._file, name)), raising=True)

    def _wrap(self, name, call):
        def told(extent: Extent) -> None:
            call(extent)
            self.calls.append((name, extent.offset))
            if name == "read":
                self.now[extent.offset] = extent.num_bytes
            elif name == "drop":
                self.now.pop(extent.offset, None)
            self.largest = max(self.largest, sum(self.now.values()))
        return told


def make(directory: Path, window: int = 1 << 30) -> tuple[Disk, list[np.ndarray]]:
    """Two states of one buffer, updated in NUM_CHUNKS chunks."""
    disk = Disk(NumpyArrays(), directory, KINDS, window)
    count = NUM_CHUNKS * CHUNK // 4
    states = [disk.zeros(name, 0, count, "float32") for name in ("exp_avg", "exp_avg_sq")]
    step = CHUNK // 4
    disk.expect([(Span(0, i * step, (i + 1) * step),) for i in range(NUM_CHUNKS)])
    return disk, states


def update(disk: Disk, states: list[np.ndarray]) -> None:
    for i in range(NUM_CHUNKS):
        disk.before(i)
        for state in states:
            state[i * CHUNK // 4 : (i + 1) * CHUNK // 4] += i + 1
        disk.after(i)


@pytest.mark.parametrize("library", [NumpyArrays(), TorchArrays()])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_an_array_is_zeros_that_keep_what_is_written(tmp_path, library, dtype):
    disk = Disk(library, tmp_path, KINDS, 1)
    array, empty = disk.zeros("exp_avg", 0, 1001, dtype), disk.zeros("exp_avg", 1, 0, dtype)
    assert (len(array), len(empty), library.dtype(array), library.abs_max(array)) == (1001, 0, dtype, 0.0)
    library.fill(array[3:900], 2.0)
    disk.release(array[3:900])
    disk.release(empty)
    disk.settle()
    disk.fetch(array[:5])
    assert library.abs_sum(array) == 2.0 * 897


def test_only_the_kinds_that_were_asked_for_are_on_disk(tmp_path):
    disk = Disk(NumpyArrays(), tmp_path, ["gradients"], 1)
    plain = [disk.zeros(name, 0, 10, "float32") for name in ("exp_avg", "master", "parameter")]
    assert disk.num_bytes == 0
    disk.zeros("gradient", 0, 10, "float32")
    assert disk.num_bytes == PAGE
    disk.zeros("pending", 0, PAGE // 4 + 1, "float32")
    assert disk.num_bytes == 3 * PAGE
    disk.release(plain[0])  # of somebody else: left alone
    disk.fetch(plain[1])


@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])  # chunks
def test_updates_keep_to_the_window_and_every_change(tmp_path, monkeypatch, window):
    disk, states = make(tmp_path, window * 2 * CHUNK)
    told = Told(disk, monkeypatch)
    for _ in range(3):
        update(disk, states)
    disk.settle()
    assert 2 * CHUNK <= told.largest <= window * 2 * CHUNK
    assert len([c for c in told.calls if c[0] == "read"]) == 3 * 2 * NUM_CHUNKS, "each page is read once an update"
    expected = np.repeat(3.0 * np.arange(1, NUM_CHUNKS + 1), CHUNK // 4)
    assert all(np.array_equal(state, expected) for state in states)


def test_a_chunk_that_is_larger_than_the_window_has_its_turn(tmp_path):
    disk, states = make(tmp_path, 1)
    update(disk, states)
    assert states[0][-1] == NUM_CHUNKS


def test_the_next_chunk_is_read_while_one_is_in_use(tmp_path, monkeypatch):
    disk, _ = make(tmp_path)
    told = Told(disk, monkeypatch)
    disk.before(0)
    disk._reader.submit(int).result()  # after all that was asked for
    assert [offset // CHUNK for name, offset in told.calls] == [0, NUM_CHUNKS, 1, NUM_CHUNKS + 1, 2, NUM_CHUNKS + 2]


def test_released_pages_leave_memory(tmp_path):
    disk, states = make(tmp_path)
    update(disk, states)
    disk.settle()
    before = resident(states[0])
    states[0].sum()
    assert before == 0 and resident(states[0]) >= NUM_CHUNKS * CHUNK
    disk.settle()
    assert resident(states[0]) == 0
    states[0].sum()
    disk.release(states[0])
    disk._writer.submit(int).result()  # after all that was asked for
    assert resident(states[0]) == 0


def resident(array: np.ndarray) -> int:
    """Bytes of the array's pages that this process has mapped now."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    address = array.ctypes.data
    for number, line in enumerate(lines):
        if "-" in (first := line.split()[0]) and ":" not in first:
            low, high = (int(x, 16) for x in first.split("-"))
            if low <= address < high:
                rss = next(x for x in lines[number:] if x.startswith("Rss:"))
                return int(rss.split()[1]) * 1024
    raise AssertionError("not mapped")


def test_the_file_has_no_name_and_ends_with_its_arrays(tmp_path):
    disk, states = make(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(open_files(tmp_path)) == 1, "one file"
    del disk, states
    assert open_files(tmp_path) == []


def test_a_file_system_without_nameless_files_will_do(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    disk, states = make(tmp_path)
    update(disk, states)
    assert list(tmp_path.iterdir()) == [] and states[0][0] == 1


def open_files(directory: Path) -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()))
        except OSError:
            continue
    return sorted({path for path in found if path.startswith(str(directory))})


def test_an_old_kernel_reads_ahead_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_POPULATE_READ", 12345)
    disk, states = make(tmp_path)
    update(disk, states)
    assert states[1][-1] == NUM_CHUNKS


@contextmanager
def full(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it `directory` has room for 64 KiB: a file system of that size, or for want of one, an imitation."""
    size = 64 * 1024
    if os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", directory],
                                            capture_output=True, check=False).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", directory], check=True)
        return

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if offset + length > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(descriptor, offset + length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fallocate)
        yield


def test_a_full_disk_is_an_error_at_the_start(tmp_path, monkeypatch):
    with full(tmp_path, monkeypatch):
        disk = Disk(NumpyArrays(), tmp_path, KINDS, 1)
        disk.zeros("exp_avg", 0, PAGE, "uint8")
        with pytest.raises(ConfigError, match=rf"offload\.directory = '{tmp_path}' is full: 'exp_avg_sq' of 100000 x "
                                              rf"float32 needs 401408 bytes besides the {PAGE} .* \d+ are free"):
            disk.zeros("exp_avg_sq", 0, 100_000, "float32")


def test_an_error_of_the_disk_is_raised_where_the_update_is(tmp_path, monkeypatch):
    disk, states = make(tmp_path, 1)

    def broken(extent: Extent) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk._file, "write_out", broken)
    with pytest.raises(OSError, match="broken"):
        update(disk, states)


@pytest.mark.parametrize(("options", "words"), [
    ({"states": "disc", "directory": "/d"}, r"offload\.states = 'disc' \(did you mean 'disk'\?\) is not legal"),
    ({"gradients": "disk"}, r"offload\.gradients = 'disk' needs zero\.offload\.directory"),
    ({"window_bytes": 0}, r"offload\.window_bytes = 0 is not legal"),
    ({"delay_start": -1}, r"offload\.delay_start = -1"),
    ({"delay": 1}, r"offload\.delay = 1"),
])
def test_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        Offload(**options)
