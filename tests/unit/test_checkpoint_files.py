"""What lies on the disk: readable by HDF5, the same every time, and every kind of damage is found."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner
from xxhash import xxh3_128_hexdigest

from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Piece, Saver, TensorSpec, Want, find, index, layout, template, verify
from hpctrain.checkpoint.find import _share
from hpctrain.checkpoint.schema import PieceRow, link_name, step_name
from hpctrain.cli.ckpt import app
from hpctrain.collectives import Group
from hpctrain.errors import CheckpointError, ConfigError, UnsupportedError
from hpctrain.transport.threads import run_threads

CASES = {  # every dtype, names that HDF5 would misread, 0-d, empty, large and small
    "layers.0.weight": ("float32", (5, 7)),
    "wide/name%b#1": ("bfloat16", (300, 40)),
    "half": ("float16", (3,)),
    "mask": ("bool", (9,)),
    "scalar": ("int64", ()),
    "empty": ("float64", (0, 3)),
    "complex": ("complex64", (4, 4)),
    "bytes": ("uint8", (70_000,)),
    "fp8": ("float8_e4m3fn", (13,)),
    "fp8 wide": ("float8_e5m2", (256,)),
    ".": ("int8", (2, 2, 2)),
    "ünïcode": ("uint64", (2,)),
}


def numpy_type(dtype):
    return np.dtype(getattr(ml_dtypes, dtype) if dtype.startswith(("bfloat", "float8")) else dtype)


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    made = {}
    for name, (dtype, shape) in CASES.items():
        raw = rng.integers(0, 256, int(np.prod(shape)) * numpy_type(dtype).itemsize, dtype=np.uint8)
        made[name] = (raw & 1 if dtype == "bool" else raw).view(numpy_type(dtype)).reshape(shape)
    return made


def alone(function):
    """function(group) on a group of one rank."""
    return run_threads(1, lambda transport: function(Group(transport, arrays_of)))[0]


def pieces_of(values, step=0):
    """Two pieces a tensor, the first a third of it."""
    pieces = []
    for name, array in values.items():
        spec = TensorSpec(name, CASES[name][0], CASES[name][1], "param")
        raw, cut = array.reshape(-1).view(np.uint8), spec.count // 3
        size = array.dtype.itemsize
        pieces.append(Piece(spec, 0, cut, memoryview(raw[: cut * size])))
        pieces.append(Piece(spec, cut, spec.count, memoryview(raw[cut * size :])))
    return pieces


def save(root, values, steps=(1,), **kwargs):
    def job(group):
        saver = Saver(root, group, keep=3, env={"host": "here"})
        states = {"random": b"\x00\x01state", "none": b""}
        return [saver.save(s, pieces_of(values), user={"loss": 0.5}, rank_state=states, **kwargs) for s in steps]

    return alone(job)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, values):
    root = tmp_path_factory.mktemp("pristine")
    save(root, values, (1, 2), mesh={"pipeline": 1, "data": 1})
    return root


@pytest.fixture
def root(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "root")


def load(where, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = alone(lambda group: find(where, group, must_exist=True, **kwargs))
    return found, [str(warning.message) for warning in caught]


def test_every_dtype_and_shape_comes_back(root, values):
    checkpoint, heard = load(root)
    assert heard == []
    assert (checkpoint.step, checkpoint.user, checkpoint.world_size) == (2, {"loss": 0.5}, 1)
    assert list(checkpoint.mesh.items()) == [("pipeline", 1), ("data", 1)]
    assert checkpoint.rank_state(0) == {"random": b"\x00\x01state", "none": b""}
    assert set(checkpoint.tensors) == set(CASES)
    for name, array in values.items():
        spec = checkpoint.tensors[name]
        assert (spec.dtype, spec.shape, spec.role) == (*CASES[name], "param")
        read = np.zeros(spec.num_bytes, np.uint8)
        checkpoint.read([Want(name, 0, spec.count, memoryview(read))])
        assert read.tobytes() == array.tobytes(), name
    assert (root / "latest").read_text() == "step-0000000002\n"
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_h5py_reads_the_same_through_index_and_shard(root, values):
    directory = root / "step-0000000002"
    link = {"wide/name%b#1": "wide%2Fname%25b%231", ".": "%2E"}
    with h5py.File(directory / "index.h5", "r", locking=False) as file:
        assert file.attrs["format"].decode() == "hpctrain-ckpt-index"
        assert file["save/step"][()] == 2
        assert file.attrs["mesh_dims"].decode() == "pipeline,data"
        for name, array in values.items():
            dataset = file["tensors"][link.get(name, name)]
            assert dataset.attrs["dtype"].decode() == CASES[name][0]
            assert tuple(dataset.attrs["shape"]) == CASES[name][1]
            raw = np.empty(dataset.shape, f"V{array.dtype.itemsize}")
            if raw.size:
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=dataset.id.get_type())
            assert raw.tobytes() == array.tobytes(), name
        wide = values["wide/name%b#1"].astype(np.float32)
        np.testing.assert_array_equal(file["tensors/wide%2Fname%25b%231"][()], wide)  # as float32 without help
    with h5py.File(directory / "shards/f00000.h5", "r", locking=False) as file:
        first, second = file["data/layers.0.weight"], file["data/layers.0.weight#1"]
        assert list(second.attrs["flat_range"]) == [11, 35]
        assert list(second.attrs["global_shape"]) == [5, 7]
        both = np.concatenate([first[()], second[()]])
        assert both.tobytes() == values["layers.0.weight"].tobytes()
        assert file["rank_state/0/random"][()].tobytes() == b"\x00\x01state"


def test_the_example_in_the_documentation_reads_every_tensor(root, values):
    page = (Path(__file__).parents[2] / "docs/checkpoint_format.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(example, names)  # noqa: S102 - our own page
    for name, array in values.items():
        read = names["read_tensor"](root / step_name(2), link_name(name))
        assert (read.shape, read.dtype) == (array.shape, array.dtype)
        assert read.tobytes() == array.tobytes(), name


def test_index_shows_nan_and_verify_complains_when_a_source_is_missing(root, monkeypatch):
    directory = root / "step-0000000002"
    (directory / "shards/f00000.h5").unlink()
    with h5py.File(directory / "index.h5", "r", locking=False) as file:  # HDF5 does not complain
        assert np.isnan(file["tensors/layers.0.weight"][()]).all()
        assert np.isnan(file["tensors/wide%2Fname%25b%231"][()]).all()
        assert (file["tensors/bytes"][()] == 255).all()
        assert (file["tensors/scalar"][()] == np.iinfo(np.int64).min).all()
    assert "f00000.h5" in verify.faults(str(directory))[0]
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    assert "Raise the limit" in verify.remarks(str(root / "step-0000000001"))[0]


def test_templates_are_the_same_bytes_every_time():
    ranges = [(TensorSpec(f"t{i}", "bfloat16", (7, 3 + i), "param"), 0, 5 + 3 * i) for i in range(300)]
    tables = layout.join([layout.announce([], {}, template.build_shard(0, [], []))])

    def build():
        return template.build_shard(3, ranges, [("state", 5)]), index.build_index(tables, 1, {"data": 1})

    one = build()
    time.sleep(1.1)  # HDF5's time stamps count seconds
    assert build() == one
    shard = one[0]
    assert len(shard.head) % 4096 == 0
    assert all(offset % 64 == 0 for offset in shard.offsets)
    assert sorted(shard.offsets) == list(shard.offsets)


@pytest.mark.parametrize("name_length", [1, 60, 4000])
def test_header_never_reaches_into_the_data(name_length):
    """Long names make HDF5 headers larger than foreseen; small and large pieces alternate."""
    sizes = [3, 5000, 1, 100_000, 511, 513]
    ranges = [
        (TensorSpec(f"{i}".ljust(name_length, "x")[:name_length] + str(i), "float32", (n,), "param"), 0, n)
        for i, n in enumerate(sizes * 5)
    ]
    made = template.build_shard(0, ranges, [("a", 3), ("b", 9000)])
    spans = sorted(zip(made.offsets, [4 * stop for _, _, stop in ranges] + [3, 9000], strict=True))
    assert spans[0][0] == len(made.head)
    assert all(a + n <= b for (a, n), (b, _) in zip(spans, [*spans[1:], (made.tail_start, 0)], strict=True))


def test_a_header_that_does_not_fit_is_built_again_with_more_room(tmp_path, monkeypatch):
    """Otherwise HDF5 would put the rest of it between the tensors, where a save does not write it."""
    ranges = [(TensorSpec(f"t{i}", "float32", (100,), "param"), 0, 100) for i in range(50)]
    monkeypatch.setattr(template, "_BYTES_OF_HEADER", 1)
    monkeypatch.setattr(template, "_BYTES_PER_DATASET", 1)
    made = template.build_shard(0, ranges, [])
    assert min(made.offsets) == len(made.head) > 4096
    (tmp_path / "f.h5").write_bytes(made.head.ljust(made.size, b"\0"))
    with h5py.File(tmp_path / "f.h5", "r") as file:
        assert [file["data"][f"t{i}"].attrs["flat_range"][1] for i in range(50)] == [100] * 50


class Short:
    """`os`, but reads and writes move at most 1000 bytes at a time, as the kernel is free to do."""

    def __getattr__(self, name):
        return getattr(os, name)

    def pwritev(self, descriptor, views, offset):
        return os.pwrite(descriptor, b"".join(views)[:1000], offset)

    def preadv(self, descriptor, views, offset):
        return os.preadv(descriptor, [views[0][:1000]], offset)


def test_short_reads_and_writes_are_carried_on(tmp_path, values):
    def job(group):
        path = Saver(tmp_path, group, system=Short()).save(1, pieces_of(values), user={})
        assert verify.faults(str(path)) == []
        checkpoint = find(path, group, must_exist=True, system=Short())
        read = np.zeros(70_000, np.uint8)
        checkpoint.read([Want("bytes", 0, 70_000, memoryview(read))])
        assert (read == values["bytes"]).all()

    alone(job)


def test_large_pieces_are_checked_to_their_end(root, monkeypatch):
    monkeypatch.setattr("hpctrain.checkpoint.validate._BLOCK", 1000)
    assert load(root)[1] == []
    damage_piece(root / step_name(2))
    assert "the checksum is wrong" in load(root)[1][0]


def test_an_index_of_another_save_under_a_right_manifest_is_refused(root):
    directory = root / step_name(2)
    shutil.copy(root / step_name(1) / "index.h5", directory / "index.h5")
    text = (directory / "manifest.json").read_text()
    body = text[: text.rindex("}") + 2]
    new = xxh3_128_hexdigest((directory / "index.h5").read_bytes())
    body = body.replace(json.loads(body)["index"][1], new)
    (directory / "manifest.json").write_text(f"{body}{xxh3_128_hexdigest(body.encode())}\n")
    assert "of another save" in load(root)[1][0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_the_work_of_checking_is_shared_out(size):
    rows = [PieceRow(0, i % 3, 0, 0, i, num_bytes, 0) for i, num_bytes in enumerate([5, 0, 100, 3, 1, 90, 60, 7] * 3)]
    shares = [_share(rows, rank, size) for rank in range(size)]
    assert sorted(row for share in shares for row in share) == sorted(rows)
    total = sum(row.num_bytes for row in rows)
    assert max(sum(row.num_bytes for row in share) for share in shares) <= total / size + 100


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def damage_piece(directory):
    tables = find_tables(directory)
    piece = max(tables.pieces, key=lambda piece: piece.num_bytes)
    flip(directory / "shards/f00000.h5", piece.offset + piece.num_bytes // 2)


def damage_state(directory):
    flip(directory / "shards/f00000.h5", find_tables(directory).states[0].offset)


def find_tables(directory):
    return index.parse_index((directory / "index.h5").read_bytes())[0]


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])


DAMAGES = {
    "a byte of a tensor": (damage_piece, "the checksum is wrong"),
    "a byte of a rank's state": (damage_state, "the checksum is wrong"),
    "a byte of the header": (lambda d: flip(d / "shards/f00000.h5", 100), "header"),
    "a byte of the hash table": (lambda d: flip(d / "shards/f00000.h5", find_tables(d).files[0].size - 3), "header"),
    "a byte of the index": (lambda d: flip(d / "index.h5", 500), "index.h5"),
    "a byte of the manifest": (lambda d: flip(d / "manifest.json", 20), "checksum"),
    "a truncated shard": (lambda d: truncate(d / "shards/f00000.h5", 1), "bytes, not"),
    "an empty shard": (lambda d: (d / "shards/f00000.h5").write_bytes(b""), "bytes, not"),
    "a truncated index": (lambda d: truncate(d / "index.h5", 1), "bytes, not"),
    "a half-written manifest": (lambda d: truncate(d / "manifest.json", 200), "checksum"),
    "an empty manifest": (lambda d: (d / "manifest.json").write_bytes(b""), "checksum"),
    "no shard": (lambda d: (d / "shards/f00000.h5").unlink(), "No such file"),
    "no index": (lambda d: (d / "index.h5").unlink(), "No such file"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "No such file"),
    "the shard of another save": (
        lambda d: shutil.copy(d.parent / step_name(1) / "shards/f00000.h5", d / "shards/f00000.h5"), "checksum",
    ),
    "the index of another save": (
        lambda d: shutil.copy(d.parent / step_name(1) / "index.h5", d / "index.h5"), "checksum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_named_and_passed_over(root, what):
    damage, words = DAMAGES[what]
    directory = root / step_name(2)
    damage(directory)
    checkpoint, heard = load(root)
    assert checkpoint.step == 1
    assert len(heard) == 1
    assert step_name(2) in heard[0]
    assert words in heard[0]
    with pytest.raises(CheckpointError, match=words):
        load(directory)
    result = CliRunner().invoke(app, ["verify", str(root)])
    assert result.exit_code == 1
    assert words in result.output
    assert f"{step_name(1)}: whole" in result.output.replace("\n", "")


def test_quick_check_leaves_tensors_to_the_read(root, values):
    damage_piece(root / step_name(2))
    checkpoint, heard = load(root, check="quick")
    assert (checkpoint.step, heard) == (2, [])
    spec = checkpoint.tensors["bytes"]
    with pytest.raises(CheckpointError, match=r"'bytes'.*the checksum is wrong"):
        checkpoint.read([Want("bytes", 0, spec.count, memoryview(bytearray(spec.num_bytes)))])
    with pytest.raises(ConfigError, match="'full' or 'quick'"):
        load(root, check="maybe")


def test_all_damaged_is_never_a_fresh_start(root):
    for step in (1, 2):
        truncate(root / step_name(step) / "manifest.json", 5)
    with pytest.raises(CheckpointError, match="none can be used"):
        alone(lambda group: find(root, group, must_exist=False))


def test_nothing_there(tmp_path):
    assert alone(lambda group: find(tmp_path / "no", group, must_exist=False)) is None
    (tmp_path / ".tmp-step-0000000001-ab").mkdir()
    assert alone(lambda group: find(tmp_path, group, must_exist=False)) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / step_name(7))


def test_latest_is_honoured_and_may_be_wrong(root):
    (root / "latest").write_text("step-0000000001\n")
    assert load(root)[0].step == 1
    (root / "latest").write_text("step-0000000009\n")
    checkpoint, heard = load(root)
    assert checkpoint.step == 2
    assert "which is not there" in heard[0]
    (root / "latest").unlink()
    assert load(root)[0].step == 2


def test_retention_counts_whole_ones_in_order_of_saving(tmp_path, values):
    def job(group):
        small = {"half": values["half"]}
        saver = Saver(tmp_path, group, keep=2)
        names = lambda: sorted(path.name for path in tmp_path.iterdir() if path.is_dir())  # noqa: E731
        for step in (5, 6):
            saver.save(step, pieces_of(small), user={})
        saver.save(3, pieces_of(small), user={})  # back to an earlier step: 6 is older than 3 now
        assert names() == [step_name(3), step_name(6)]
        saver.save(3, pieces_of(small), user={"again": True})  # never overwrites
        assert names() == [step_name(3), step_name(3, 2)]
        assert find(tmp_path, group, must_exist=True).user == {"again": True}
        (tmp_path / step_name(3, 2) / "shards/f00000.h5").unlink()
        (tmp_path / ".tmp-step-0000000009-dead").mkdir()
        saver.save(4, pieces_of(small), user={})  # the damaged one does not count, and is left for people to see
        assert names() == [step_name(3), step_name(3, 2), step_name(4)]
        (tmp_path / step_name(3)).rename(tmp_path / "mine")  # a name that is not ours
        saver.save(5, pieces_of(small), user={})
        saver.save(6, pieces_of(small), user={})
        assert names() == ["mine", step_name(5), step_name(6)]

    alone(job)


def spec(name="w", dtype="float32", shape=(4,)):
    return TensorSpec(name, dtype, shape, "param")


HALF = memoryview(bytes(8))


@pytest.mark.parametrize(
    ("pieces", "user", "words"),
    [
        ([Piece(spec(), 0, 4, memoryview(bytes(15)))], {}, "'w'.*needs 16 bytes"),
        ([Piece(spec(), 0, 5, memoryview(bytes(20)))], {}, r"'w'.*\[0, 5\)"),
        ([Piece(spec(), 0, 3, memoryview(bytes(12)))], {}, r"'w': elements \[3, 4\) are given by no rank"),
        ([Piece(spec(), 1, 4, memoryview(bytes(12)))], {}, r"'w': elements \[0, 1\) are given by no rank"),
        ([Piece(spec(), 0, 4, memoryview(bytes(16)))] * 2, {}, "'w'.*given twice"),
        ([Piece(spec(), 0, 2, HALF), Piece(spec(shape=(2, 2)), 2, 4, HALF)], {}, "'w' is"),
        ([Piece(spec(shape=(1,) * 9), 0, 1, memoryview(bytes(4)))], {}, "at most 8 dims"),
        ([Piece(spec(name=""), 0, 4, memoryview(bytes(16)))], {}, "must not be empty"),
        ([], {"bad": object()}, "only what JSON can"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_written(tmp_path, pieces, user, words):
    with pytest.raises(CheckpointError, match=words):
        alone(lambda group: Saver(tmp_path, group).save(1, pieces, user=user))
    assert list(tmp_path.iterdir()) == []


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep = 0"):
        alone(lambda group: Saver(tmp_path, group, keep=0))
    for step in (-1, 1.5, True, None):
        with pytest.raises(CheckpointError, match="step = "):
            alone(lambda group, step=step: Saver(tmp_path, group).save(step, [], user={}))
    unknown = Piece(spec(dtype="float4"), 0, 4, memoryview(b""))
    with pytest.raises(UnsupportedError, match="legal are"):
        alone(lambda group: Saver(tmp_path, group).save(1, [unknown], user={}))


def test_bad_wants_are_refused(root):
    checkpoint, _ = load(root)
    buffer = memoryview(bytearray(8))
    for want, words in [
        (Want("layers.0.weigth", 0, 2, buffer), "did you mean 'layers.0.weight'"),
        (Want("layers.0.weight", 34, 36, buffer), "not within its shape"),
        (Want("layers.0.weight", 0, 1, buffer), "4 writable bytes"),
        (Want("layers.0.weight", 0, 2, memoryview(bytes(8))), "writable"),
        (Want.box("layers.0.weight", ((0, 2),), buffer), "not within its shape"),
        (Want.box("layers.0.weight", ((4, 6), (0, 1)), buffer), "not within its shape"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.read([want])
    with pytest.raises(CheckpointError, match="rank = 1"):
        checkpoint.rank_state(1)


def test_the_manifest_is_plain_json_and_a_checksum(root):
    lines = (root / step_name(2) / "manifest.json").read_text().splitlines()
    manifest = json.loads("\n".join(lines[:-1]))
    assert len(lines[-1]) == 32
    assert list(manifest) == sorted(manifest)
    assert manifest["env"] == {"host": "here"}
    assert manifest["sequence"] == 2


def test_the_index_is_patched_not_rebuilt(tmp_path, values, monkeypatch):
    calls = []
    real = index.build_index
    monkeypatch.setattr("hpctrain.checkpoint.write.build_index", lambda *args: calls.append(1) or real(*args))
    save(tmp_path, values, (1, 2, 3))
    assert len(calls) == 1


def test_ls_and_show(root):
    run = CliRunner(env={"COLUMNS": "160"}).invoke
    listed = run(app, ["ls", str(root)])
    assert listed.exit_code == 0
    assert step_name(1) in listed.output
    assert "latest" in listed.output
    shown = run(app, ["show", str(root)])
    assert shown.exit_code == 0
    for words in ("step 2", "layers.0.weight", "bfloat16", "300x40", "scalar", "shards/f00000.h5", '"loss": 0.5'):
        assert words in shown.output
    assert run(app, ["verify", str(root / step_name(1))]).exit_code == 0
    missing = run(app, ["ls", str(root / "no")])
    assert missing.exit_code == 1
    truncate(root / step_name(2) / "manifest.json", 5)
    assert "damaged" in run(app, ["ls", str(root)]).output


def test_without_h5py_import_works_and_save_refuses(tmp_path):
    code = f"""
import sys
sys.modules["h5py"] = None
import hpctrain
from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Saver
from hpctrain.collectives import Group
from hpctrain.transport.threads import run_threads
run_threads(1, lambda t: Saver({str(tmp_path)!r}, Group(t, arrays_of)).save(1, [], user={{}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "CheckpointError" in done.stderr
    assert "pip install h5py" in done.stderr
