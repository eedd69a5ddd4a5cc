"""Every kind of damage is found, named and passed over; what cannot be right is refused."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hpctrain.checkpoint import Piece, Saver, TensorSpec, Want, find, index
from hpctrain.checkpoint.schema import step_name
from hpctrain.cli.ckpt import app
from hpctrain.errors import CheckpointError, ConfigError, UnsupportedError
from tests.unit.checkpoint.cases import (
    alone,
    damage_piece,
    damage_state,
    find_tables,
    flip,
    load,
    pieces_of,
    save,
)


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
