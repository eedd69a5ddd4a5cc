"""Many ranks save, others load: any layout to any layout, and failures that all ranks hear of."""

import errno
import os
import random
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Piece, Saver, TensorSpec, Want, find, verify
from hpctrain.checkpoint.schema import step_name
from hpctrain.collectives import Group
from hpctrain.errors import CheckpointError
from hpctrain.transport.threads import run_threads

SPECS = [
    TensorSpec("matrix", "float32", (37, 41), "param"),
    TensorSpec("cube", "bfloat16", (5, 6, 7), "param"),
    TensorSpec("optim.exp_avg.matrix", "float32", (37, 41), "exp_avg"),
    TensorSpec("large", "float16", (1200, 1000), "param"),  # more than the bounce buffer, cut anywhere
    TensorSpec("step", "int64", (), "buffer"),
    TensorSpec("flags", "bool", (3,), "buffer"),
    TensorSpec("nothing", "float32", (0, 4), "buffer"),
]


def on_ranks(size, function):
    return run_threads(size, lambda transport: function(Group(transport, arrays_of)))


def content(spec):
    """The bytes of a tensor, a function of its name."""
    rng = np.random.default_rng(sum(spec.name.encode()))
    return rng.integers(0, 2 if spec.dtype == "bool" else 256, spec.num_bytes, dtype=np.uint8)


def cuts(spec, size, rng, *, owners):
    """Uneven borders for `size` ranks; ranks outside `owners` get nothing."""
    inner = sorted(rng.randint(0, spec.count) for _ in range(len(owners) - 1))
    edges = dict(zip(owners, zip([0, *inner], [*inner, spec.count], strict=True), strict=True))
    return [edges.get(rank, (0, 0)) for rank in range(size)]


def save_on(root, size, rng, step=1):
    owners = sorted(rng.sample(range(size), max(1, size - 1)))  # one rank owns nothing, where there are several
    plan = {spec: cuts(spec, size, rng, owners=owners) for spec in SPECS}

    def job(group):
        pieces = []
        for spec in SPECS:
            start, stop = plan[spec][group.rank]
            item = spec.num_bytes // max(1, spec.count)
            if group.rank in owners:
                pieces.append(Piece(spec, start, stop, memoryview(content(spec)[start * item : stop * item])))
        state = {"rng": f"rank {group.rank}".encode()}
        return Saver(root, group).save(step, pieces, user={"data": [1, 2]}, rank_state=state, mesh={"data": size})

    paths = on_ranks(size, job)
    assert len(set(paths)) == 1
    return paths[0]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 2), (4, 3), (2, 4), (1, 3), (3, 3)])
def test_any_ranges_to_any_ranges_bitwise(tmp_path, before, after):
    rng = random.Random(10 * before + after)
    path = save_on(tmp_path, before, rng)
    assert verify.faults(str(path)) == []
    plan = {spec: cuts(spec, after, rng, owners=range(after)) for spec in SPECS}

    def job(group):
        checkpoint = find(tmp_path, group, must_exist=True)
        assert checkpoint.world_size == before
        assert [checkpoint.rank_state(r)["rng"] for r in range(before)] == [f"rank {r}".encode() for r in range(before)]
        parts, wants = {}, []
        for spec in SPECS:
            start, stop = plan[spec][group.rank]
            parts[spec.name] = np.zeros((stop - start) * spec.num_bytes // max(1, spec.count), np.uint8)
            wants.append(Want(spec.name, start, stop, memoryview(parts[spec.name])))
        checkpoint.read(wants)
        return parts

    loaded = on_ranks(after, job)
    for spec in SPECS:
        assert np.concatenate([parts[spec.name] for parts in loaded]).tobytes() == content(spec).tobytes(), spec.name


@pytest.mark.parametrize("seed", range(3))
def test_boxes_of_rows_and_columns_bitwise(tmp_path, seed):
    rng = random.Random(seed)
    save_on(tmp_path, 3, rng)

    def job(group):
        checkpoint = find(tmp_path, group, must_exist=True, check="quick")
        for spec in SPECS:
            whole = content(spec).view(f"V{max(1, spec.num_bytes // max(1, spec.count))}").reshape(spec.shape)
            slices = [tuple((0, n) for n in spec.shape)]  # everything, columns, rows, random
            if spec.shape:
                *front, last = spec.shape
                slices.append((*((0, n) for n in front), (last // 3, last)))
                slices.append(((spec.shape[0] // 2, spec.shape[0]), *((0, n) for n in spec.shape[1:])))
            slices += [tuple(sorted((rng.randint(0, n), rng.randint(0, n))) for n in spec.shape) for _ in range(3)]
            targets = [np.zeros([b - a for a, b in box], whole.dtype) for box in slices]
            checkpoint.read(
                [Want.box(spec.name, tuple(map(tuple, box)), memoryview(target.reshape(-1).view(np.uint8)))
                 for box, target in zip(slices, targets, strict=True)]
            )  # fmt: skip
            for box, target in zip(slices, targets, strict=True):
                assert target.tobytes() == whole[tuple(slice(a, b) for a, b in box)].tobytes(), (spec.name, box)

    on_ranks(1, job)


class Failing:
    """`os`, but one call fails, as it would on a full disk or a broken device."""

    def __init__(self, call, at, number=errno.ENOSPC):
        self._call, self._at, self._number = call, at, number
        self.calls = 0

    def __getattr__(self, name):
        function = getattr(os, name)
        if name != self._call:
            return function

        def counted(*args):
            self.calls += 1
            if self.calls == self._at:
                raise OSError(self._number, os.strerror(self._number))
            return function(*args)

        return counted


@pytest.mark.parametrize(
    ("rank", "call", "at"),
    [(0, "pwritev", 1), (1, "pwritev", 1), (2, "fsync", 1), (1, "open", 1), (0, "mkdir", 2), (0, "fsync", 2),
     (0, "fsync", 4), (0, "rename", 1), (0, "rename", 2), (0, "pwritev", 2), (0, "pwritev", 3), (0, "pwritev", 4)],
)  # fmt: skip
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, rank, call, at):
    rng = random.Random(5)
    old = save_on(tmp_path, 3, rng)

    def job(group):
        system = Failing(call, at) if group.rank == rank else os
        piece = Piece(TensorSpec("w", "uint8", (3,), "param"), group.rank, group.rank + 1, memoryview(b"x"))
        saver = Saver(tmp_path, group, keep=1, system=system)
        try:
            saver.save(2, [piece], user={})
        except CheckpointError as error:
            first = str(error)
        else:
            raise AssertionError("the save succeeded")
        group.barrier()  # rank 0 clears up after it has heard
        left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
        group.barrier()
        saver.save(3, [piece], user={})  # the training goes on, and so do the saves
        return first, left

    told = on_ranks(3, job)
    assert len({message for message, _ in told}) == 1
    assert f"rank {rank}" in told[0][0]
    assert "No space left on device" in told[0][0]
    assert "free some room" in told[0][0]
    assert all(not name.startswith(".tmp") for _, left in told for name in left)
    assert not old.exists()  # only the good save after it may have deleted it
    assert (tmp_path / "latest").read_text() == f"{step_name(3)}\n"


def test_after_a_failed_save_the_old_checkpoint_is_intact(tmp_path):
    old = save_on(tmp_path, 2, random.Random(5))

    def job(group):
        system = Failing("pwritev", 1) if group.rank == 1 else os
        piece = Piece(TensorSpec("w", "uint8", (2,), "param"), group.rank, group.rank + 1, memoryview(b"x"))
        with pytest.raises(CheckpointError):
            Saver(tmp_path, group, keep=1, system=system).save(2, [piece], user={})
        return find(tmp_path, group, must_exist=True).step

    assert on_ranks(2, job) == [1, 1]
    assert verify.faults(str(old)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", step_name(1)]


def test_old_checkpoints_that_cannot_be_deleted_do_not_fail_the_save(tmp_path):
    def job(group):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2):
                Saver(tmp_path, group, keep=1, system=Failing("rename", 3, errno.EACCES)).save(step, [], user={})
        return [str(warning.message) for warning in caught]

    (heard,) = on_ranks(1, job)
    assert ["could not be deleted" in message for message in heard] == [True]
    assert (tmp_path / "latest").read_text() == f"{step_name(2)}\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: (rank, [(0, 2), (2, 4)][rank]), "step differs: 0 on rank 0 and 1 on rank 1"),
        (lambda rank: (7, [(0, 2), (1, 4)][rank]), r"'w': elements \[1, 2\) are given twice, by ranks 0 and 1"),
        (lambda rank: (7, [(0, 1), (2, 4)][rank]), r"'w': elements \[1, 2\) are given by no rank"),
    ],
)
def test_ranks_that_disagree_all_hear_it(tmp_path, make, words):
    def job(group):
        step, (start, stop) = make(group.rank)
        piece = Piece(TensorSpec("w", "uint8", (4,), "param"), start, stop, memoryview(bytes(stop - start)))
        with pytest.raises(CheckpointError, match=words) as caught:
            Saver(tmp_path, group).save(step, [piece], user={})
        return str(caught.value)

    assert len(set(on_ranks(2, job))) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_changes_on_one_rank_is_written_anew(tmp_path):
    """Borders move between saves; only rank 1's list changes in a way that rank 0 cannot see by itself."""

    def job(group):
        saver = Saver(tmp_path, group, keep=5)
        for step, owner in enumerate([1, 1, 2]):
            pieces = [Piece(TensorSpec("w", "uint8", (1,), "param"), 0, 1, memoryview(bytes([step])))]
            saver.save(step, pieces if group.rank == owner else [], user={})
        for step in range(3):
            checkpoint = find(tmp_path / step_name(step), group, must_exist=True)
            value = bytearray(1)
            checkpoint.read([Want("w", 0, 1, memoryview(value))])
            assert value[0] == step

    on_ranks(3, job)


def test_damage_that_one_rank_sees_moves_all_to_the_older_one(tmp_path):
    rng = random.Random(3)
    save_on(tmp_path, 4, rng)
    path = save_on(tmp_path, 4, rng, step=2)
    for shard in sorted((path / "shards").iterdir())[-2:]:
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)

    def job(group):
        return find(tmp_path, group, must_exist=True).step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert on_ranks(3, job) == [1, 1, 1]
    assert len(caught) == 1  # said once, not by every rank
    assert "f00003.h5" in str(caught[0].message)

    shutil.rmtree(tmp_path / step_name(1))

    def hopeless(group):
        with pytest.raises(CheckpointError) as error:
            find(tmp_path, group, must_exist=False)
        return str(error.value)

    assert len(set(on_ranks(3, hopeless))) == 1


def test_a_reader_holds_and_locks_the_previous_checkpoint(tmp_path):
    """Another process's lock on the files of a checkpoint stops neither saves nor loads nor its deletion."""
    import fcntl

    path = save_on(tmp_path, 2, random.Random(1))
    held = [file.open("r+b") for file in [path / "index.h5", *(path / "shards").iterdir()]]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)

    def job(group):
        step = find(tmp_path, group, must_exist=True).step
        piece = Piece(TensorSpec("w", "uint8", (2,), "param"), group.rank, group.rank + 1, memoryview(b"x"))
        Saver(tmp_path, group, keep=1).save(2, [piece], user={})
        return step, find(tmp_path, group, must_exist=True).step

    assert on_ranks(2, job) == [(1, 2), (1, 2)]
    for file in held:
        file.close()


def test_load_takes_little_memory_beyond_the_destination(tmp_path):
    """A column slice of a large tensor goes through one small buffer, and not through the whole tensor."""
    import tracemalloc

    spec = TensorSpec("large", "uint8", (4096, 8192), "param")  # 32 MiB
    whole = np.arange(spec.count, dtype=np.uint8).reshape(spec.shape)

    def job(group):
        Saver(tmp_path, group).save(1, [Piece(spec, 0, spec.count, memoryview(whole.reshape(-1)))], user={})
        checkpoint = find(tmp_path, group, must_exist=True)
        target = np.zeros((4096, 100), np.uint8)
        tracemalloc.start()
        checkpoint.read([Want.box("large", ((0, 4096), (50, 150)), memoryview(target.reshape(-1)))])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (target == whole[:, 50:150]).all()
        return peak

    assert on_ranks(1, job)[0] < 8 << 20


def test_wants_may_overlap(tmp_path):
    """A range larger than the buffer, twice, and parts of it, in one call."""
    spec = TensorSpec("large", "uint8", (3000, 3000), "param")
    whole = np.random.default_rng(0).integers(0, 256, spec.shape, dtype=np.uint8)

    def job(group):
        Saver(tmp_path, group).save(1, [Piece(spec, 0, spec.count, memoryview(whole.reshape(-1)))], user={})
        targets = [np.zeros(spec.count, np.uint8) for _ in range(2)]
        part = np.zeros((3000, 7), np.uint8)
        wants = [Want("large", 0, spec.count, memoryview(target)) for target in targets]
        wants.append(Want.box("large", ((0, 3000), (0, 7)), memoryview(part.reshape(-1))))
        find(tmp_path, group, must_exist=True).read(wants)
        assert all((target == whole.reshape(-1)).all() for target in targets)
        assert (part == whole[:, :7]).all()

    on_ranks(1, job)


def test_directories_that_appear_late_are_waited_for(tmp_path):
    """A network file system may show rank 0's new directory to others only after a while."""
    missing = SimpleNamespace(left=3)

    class Late:
        def __getattr__(self, name):
            return getattr(os, name)

        def open(self, path, flags, mode=0o777):
            if "shards/f" in path and flags & os.O_CREAT and missing.left:
                missing.left -= 1
                raise FileNotFoundError(errno.ENOENT, "not yet", path)
            return os.open(path, flags, mode)

    def job(group):
        return Saver(tmp_path, group, system=Late() if group.rank else os).save(1, [], user={})

    assert on_ranks(2, job)[0].exists()
    assert missing.left == 0
