"""What lies on the disk: readable by HDF5, the same every time, whatever the dtype and shape."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from hpctrain.checkpoint import Saver, TensorSpec, Want, find, index, layout, template, verify
from hpctrain.checkpoint.find import _share
from hpctrain.checkpoint.schema import PieceRow, link_name, step_name
from tests.unit.checkpoint.cases import CASES, alone, damage_piece, load, pieces_of


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
    page = (Path(__file__).parents[3] / "docs/checkpoint_format.md").read_text()
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
