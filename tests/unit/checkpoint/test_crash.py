"""The crash model: the real save on a file system that forgets, the real load on what is left.

`Forgetful` has the functions of `os` and keeps a log. A crash is a point in the log, after which everything that was
not synced survives in an arbitrary subset: blocks of files, and names in directories (the worst that POSIX allows).
The same test shows that it can fail: leave out one sync, or delete before the commit, and checkpoints are lost.
"""

import errno
import os
import random
import stat
import threading
import warnings
from collections import Counter
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Piece, Saver, TensorSpec, Want, commit, find, keep, validate
from hpctrain.collectives import Group
from hpctrain.errors import CheckpointError
from hpctrain.transport.threads import run_threads

BLOCK = 4096
STEPS = 4
ROOT = "/root"


class Inode:
    def __init__(self, is_directory):
        self.entries = {} if is_directory else None
        self.data = bytearray()


class Forgetful:
    """A file system in memory with the functions of `os` that checkpoints use. Thread-safe."""

    def __init__(self, root=None):
        self.root = root or Inode(True)
        self.log = []  # (kind, inode, ...) in the order of the calls
        self._open = {}
        self._lock = threading.RLock()

    def _find(self, path):
        node = self.root
        for name in path.strip("/").split("/"):
            if name:
                if node.entries is None:
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
                if name not in node.entries:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                node = node.entries[name]
        return node

    def _parent(self, path):
        parent, _, name = path.rstrip("/").rpartition("/")
        return self._find(parent), name

    def open(self, path, flags, mode=0o777):
        with self._lock:
            parent, name = self._parent(path)
            if name and name not in parent.entries and flags & os.O_CREAT:
                node = parent.entries[name] = Inode(False)
                self.log.append(("link", parent, name, node))
            node = self._find(path)
            assert not (flags & os.O_TRUNC and node.data), "a checkpoint never overwrites a file"
            descriptor = max(self._open, default=99) + 1
            self._open[descriptor] = (node, path)
            return descriptor

    def close(self, descriptor):
        with self._lock:
            del self._open[descriptor]

    def pwritev(self, descriptor, views, offset):
        with self._lock:
            node, _ = self._open[descriptor]
            data = b"".join(views)
            node.data.extend(bytes(max(0, offset + len(data) - len(node.data))))
            node.data[offset : offset + len(data)] = data
            self.log.append(("write", node, offset, data))
            return len(data)

    def preadv(self, descriptor, views, offset):
        (view,) = views
        data = self._open[descriptor][0].data[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def pread(self, descriptor, count, offset):
        return bytes(self._open[descriptor][0].data[offset : offset + count])

    def fsync(self, descriptor):
        with self._lock:
            node, path = self._open[descriptor]
            self.log.append(("sync", node, path))

    def stat(self, path):
        node = self._find(path)
        kind = stat.S_IFREG if node.entries is None else stat.S_IFDIR
        return SimpleNamespace(st_mode=kind, st_size=len(node.data))

    lstat = stat

    def listdir(self, path):
        return sorted(self._find(path).entries)

    def mkdir(self, path, mode=0o777):
        with self._lock:
            parent, name = self._parent(path)
            if name in parent.entries:
                raise FileExistsError(errno.EEXIST, "exists", path)
            node = parent.entries[name] = Inode(True)
            self.log.append(("link", parent, name, node))

    def rename(self, source, target):
        with self._lock:
            parent, name = self._parent(source)
            other, new = self._parent(target)
            assert parent is other, "renames stay within one directory"
            existing = parent.entries.get(new)
            assert existing is None or existing.entries is None, "a directory is never replaced"
            parent.entries[new] = parent.entries.pop(name)
            self.log.append(("rename", parent, name, new, parent.entries[new]))

    def unlink(self, path):
        with self._lock:
            parent, name = self._parent(path)
            del parent.entries[name]
            self.log.append(("unlink", parent, name))

    def rmdir(self, path):
        assert not self._find(path).entries
        self.unlink(path)


def after_crash(log, rng):
    """The file system that is left when the machine dies at the end of `log`."""
    synced = {}
    for i, event in enumerate(log):
        if event[0] == "sync":
            synced[event[1]] = i
    survival = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])  # few crashes lose everything, few nothing
    new = {}

    def twin(node):
        return new.setdefault(node, Inode(node.entries is not None))

    root = None
    for i, event in enumerate(log):
        kind, node = event[0], event[1]
        if root is None and kind == "link":
            root = node  # the first name is made in the root
        durable = i < synced.get(node, -1)
        if kind == "write":
            offset, data = event[2:]
            for at in range(0, len(data), BLOCK):
                if durable or rng.random() < survival:
                    file, block = twin(node).data, data[at : at + BLOCK]
                    file.extend(bytes(max(0, offset + at + len(block) - len(file))))
                    file[offset + at : offset + at + len(block)] = block
        elif kind in ("link", "unlink", "rename") and (durable or rng.random() < survival):
            entries = twin(node).entries
            if kind == "link":
                entries[event[2]] = twin(event[3])
            else:
                entries.pop(event[2], None)
                if kind == "rename":
                    entries[event[3]] = twin(event[4])
    return Forgetful(twin(root) if root is not None else Inode(True))


def record(num_keep=1):
    """The log of STEPS saves on two ranks; ("ack", step) where a save returned. Rank 1 owns the larger part."""
    system = Forgetful()
    system.mkdir(ROOT)
    system.fsync(system.open("/", os.O_RDONLY))

    def job(transport):
        group = Group(transport, arrays_of)
        saver = Saver(ROOT, group, keep=num_keep, system=system)
        start, stop = [(0, 700), (700, 3000)][group.rank]
        for step in range(1, STEPS + 1):
            tensor = TensorSpec("w", "float32", (30, 100), "param")
            memory = memoryview(np.full(stop - start, step, np.float32)).cast("B")
            saver.save(step, [Piece(tensor, start, stop, memory)], user={"step": step})
            group.barrier()
            if group.rank == 0:
                system.log.append(("ack", None, step))
            group.barrier()

    run_threads(2, job)
    return system.log


def judge(log, rng, group):
    """One crash at a random moment, then a load: "right", "half", "lost" or "nothing"."""
    log = log[: rng.randrange(2, len(log) + 1)]
    acknowledged = max((event[2] for event in log if event[0] == "ack"), default=0)
    system = after_crash(log, rng)
    try:
        checkpoint = find(ROOT, group, must_exist=False, system=system)
    except CheckpointError:
        return "nothing" if acknowledged else "right"
    if checkpoint is None:
        return "nothing" if acknowledged else "right"
    values = np.zeros(3000, np.float32)
    checkpoint.read([Want("w", 0, 3000, memoryview(values).cast("B"))])
    if not (values == checkpoint.step).all() or checkpoint.user != {"step": checkpoint.step}:
        return "half"
    return "right" if checkpoint.step >= acknowledged else "lost"


@pytest.fixture
def crash(monkeypatch):
    """crash(log, times) -> Counter of verdicts."""
    monkeypatch.setattr(validate, "parse_index", lru_cache(validate.parse_index))  # the same few indices every time

    def run(log, times):
        def job(transport):
            rng, group = random.Random(1), Group(transport, arrays_of)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Counter(judge(log, rng, group) for _ in range(times))

        return run_threads(1, job, timeout=120)[0]

    return run


@pytest.mark.parametrize("num_keep", [1, 2])
def test_no_crash_loses_what_was_acknowledged(crash, num_keep):
    assert crash(record(num_keep), 3000) == {"right": 3000}


def without_sync(log, is_dropped):
    kept = [event for event in log if not (event[0] == "sync" and is_dropped(event[2]))]
    assert len(kept) < len(log)
    return kept


@pytest.mark.parametrize(
    "is_dropped",
    [
        pytest.param(lambda path: "/shards/f" in path, id="shards"),
        pytest.param(lambda path: path.endswith("index.h5"), id="index"),
        pytest.param(lambda path: path.endswith("manifest.json"), id="manifest"),
        pytest.param(lambda path: path.endswith("/shards"), id="directory of the shards"),
        pytest.param(lambda path: "/.tmp-" in path and path.count("/") == 2, id="directory of the checkpoint"),
        pytest.param(lambda path: path == ROOT, id="root"),
    ],
)
def test_each_sync_is_needed(crash, is_dropped):
    verdicts = crash(without_sync(record(), is_dropped), 1000)
    assert verdicts["lost"] + verdicts["nothing"] > 0, verdicts
    assert verdicts["half"] == 0, verdicts  # checksums: never wrong values


def test_the_sync_of_the_pointer_is_not(crash):
    assert crash(without_sync(record(), lambda path: ".latest-" in path), 1000) == {"right": 1000}


def test_deleting_before_the_commit_loses(crash, monkeypatch):
    perform = commit.perform

    def delete_first(todo, system):
        for entry in keep.entries(ROOT, system):
            system.rename(f"{ROOT}/{entry.name}", f"{ROOT}/.trash-{entry.name}")
        perform(todo, system)

    monkeypatch.setattr(commit, "perform", delete_first)
    verdicts = crash(record(), 1000)
    assert verdicts["nothing"] > 0, verdicts


def test_committing_in_another_order_loses(crash, monkeypatch):
    """The manifest renamed into place and the save acknowledged, while the directory is synced too early."""
    operations = commit.operations

    def early(*args):
        todo = operations(*args)
        syncs = [operation for operation in todo if operation.action == "sync"]
        return syncs[:2] + [operation for operation in todo if operation not in syncs] + syncs[2:]

    monkeypatch.setattr(commit, "operations", early)
    verdicts = crash(record(), 1000)
    assert verdicts["lost"] + verdicts["nothing"] > 0, verdicts
