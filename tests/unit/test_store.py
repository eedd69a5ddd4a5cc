"""Token stores: made from files and folders, whole or not at all, mapped without HDF5 on the data path."""

import os

import h5py
import numpy as np
import pytest

from hpctrain.data import prepare
from hpctrain.data.prepare import find_documents, prepare_store, split_documents
from hpctrain.data.store import locate, open_store
from hpctrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.py": "bb", "a.py": "a" * 5, "sub/c.py": "ccc", "sub/d.txt": "d", "empty.py": ""}.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "in"


def names(documents):
    return [d.name for d in documents]


def test_documents_come_in_the_order_of_their_names(folder):
    assert names(find_documents([folder], suffixes=[".py"])) == ["a.py", "b.py", "sub/c.py"]
    assert names(find_documents([folder], suffixes=[".py"], recursive=False)) == ["a.py", "b.py"]
    assert names(find_documents([folder])) == ["a.py", "b.py", "sub/c.py", "sub/d.txt"]
    assert names(find_documents([folder / "sub/d.txt", folder], suffixes=[".py"])) == ["d.txt", "a.py", "b.py",
                                                                                       "sub/c.py"]
    assert names(find_documents([folder, folder / "a.py"], suffixes=[".py"])) == ["a.py", "b.py", "sub/c.py"]  # once
    assert names(find_documents([folder], limit=9)) == ["a.py", "b.py"]


def test_nothing_found_is_an_error(folder):
    with pytest.raises(ConfigError, match="no document"):
        find_documents([folder], suffixes=[".rst"])
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        find_documents([folder / "none"])


def test_tail_split_round_trip(folder, tmp_path):
    out = tmp_path / "out" / "data.h5"
    sizes = prepare_store(out, find_documents([folder], suffixes=[".py"]), split="tail", percent=40)
    store = open_store(out)
    assert bytes(store.train) == b"aaa\0bb\0cc\0"
    assert bytes(store.validation) == b"aa\0c\0"
    assert sizes == {"train": 10, "validation": 5}
    assert isinstance(store.train, np.memmap)
    assert store.vocabulary == 256
    assert os.listdir(out.parent) == ["data.h5"]  # noqa: PTH208 - hidden files are what is looked for
    with h5py.File(out) as file:
        assert file["sources"]["name"].astype(str).tolist() == ["a.py", "b.py", "sub/c.py"] \
            or [n.decode() for n in file["sources"]["name"]] == ["a.py", "b.py", "sub/c.py"]
        assert file["sources"]["num_bytes"].tolist() == [5, 2, 3]
        assert "40 %" in file.attrs["split_rule"]
        assert bytes(file["train"][:]) == bytes(store.train)  # HDF5's own reader sees the same


def test_the_same_files_give_the_same_bytes(folder, tmp_path):
    documents = find_documents([folder], suffixes=[".py"])
    for name in "xy":
        prepare_store(tmp_path / name, documents, split="tail", percent=40)
    assert open_store(tmp_path / "x").hash == open_store(tmp_path / "y").hash


def test_document_split_is_by_content(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i:02}").write_text(str(i // 2) * 10)  # twins: equal content
    documents = find_documents([tmp_path / "in"])
    parts = split_documents(documents, "documents", 30.0)
    assert all(parts[i] == parts[i + 1] for i in range(0, 40, 2))  # twins are on one side
    assert 0 < sum(part[1] > 0 for part in parts) < 25
    assert parts[:20] == split_documents(documents[:20], "documents", 30.0)  # more documents move none


def test_splits_that_leave_a_side_empty_are_refused(folder):
    documents = find_documents([folder], suffixes=[".py"])
    with pytest.raises(ConfigError, match="nothing for"):
        split_documents(documents, "tail", 1.0)
    with pytest.raises(ConfigError, match="'tail'"):
        split_documents(documents, "halves", 50.0)
    with pytest.raises(ConfigError, match="between 0 and 100"):
        split_documents(documents, "tail", 0.0)


def test_a_failure_leaves_the_old_store_and_no_rest(folder, tmp_path, monkeypatch):
    out = tmp_path / "out" / "data.h5"
    documents = find_documents([folder], suffixes=[".py"])
    prepare_store(out, documents, split="tail", percent=40)
    before = out.read_bytes()
    (folder / "b.py").write_text("b")
    with pytest.raises(ConfigError, match="shorter"):
        prepare_store(out, documents, split="tail", percent=40)
    monkeypatch.setattr(prepare, "_sync", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        prepare_store(out, documents[:1], split="tail", percent=40)
    assert out.read_bytes() == before
    assert os.listdir(out.parent) == ["data.h5"]  # noqa: PTH208 - hidden files are what is looked for


def test_uint16_stores_and_found_places(tmp_path):
    path = tmp_path / "big.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update(format="hpctrain-tokens", format_version=1, vocabulary=1000, hash="h")
        file["train"] = np.arange(300, dtype="<u2")
        file["validation"] = np.empty(0, "<u2")
    store = open_store(path, locate(path))
    assert store.train.dtype == np.uint16
    assert store.train[299] == 299
    assert len(store.validation) == 0


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no token store"):
        open_store(tmp_path / "none.h5")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="not an HDF5 file"):
        open_store(tmp_path / "text")
    with h5py.File(tmp_path / "other.h5", "w"):
        pass
    with pytest.raises(ConfigError, match="not a token store of version 1"):
        open_store(tmp_path / "other.h5")
