"""Small files between ranks: rounds begin once, notes belong to their round, leftovers are taken over."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from hpctrain.runtime.notes import Notes


def test_a_round(tmp_path):
    judge, other = Notes(tmp_path / "hang", 3), Notes(tmp_path / "hang", 0)
    assert other.round() is None and other.count() == 0
    other.write("?", {"early": True})  # nobody asked: nothing is written
    assert not (tmp_path / "hang").exists()
    name = judge.call(stale=60)
    assert name is not None and other.round() == name
    assert other.call(stale=60) is None, "there is one judge"
    other.write(name, {"rank": 0})
    assert judge.count() == 1 and judge.read(name) == {0: {"rank": 0}}
    judge.clear()
    assert not (tmp_path / "hang").exists()
    again = judge.call(stale=60)
    assert again not in (None, name)
    other.write(name, {"late": True})
    assert judge.read(again) == {}, "an answer to an earlier round does not count"


def test_a_note_that_comes_while_the_round_is_cleared_leaves_nothing(tmp_path, monkeypatch):
    judge = Notes(tmp_path / "hang", 3)
    judge.call(stale=60)
    remove, late = shutil.rmtree, []

    def remove_but_one(path, ignore_errors):
        remove(path, ignore_errors=ignore_errors)
        if not late:
            late.append(path)
            path.mkdir()
            (path / "rank-0.json").touch()

    monkeypatch.setattr("hpctrain.runtime.notes.shutil.rmtree", remove_but_one)
    judge.clear()
    assert late and not (tmp_path / "hang").exists()


def test_a_judge_that_died_is_followed_by_another(tmp_path):
    dead, other = Notes(tmp_path / "hang", 1), Notes(tmp_path / "hang", 2)
    dead.call(stale=60)
    past = time.time() - 100
    os.utime(tmp_path / "hang" / "alarm", (past, past))
    name = other.call(stale=60)
    assert name is not None and name.startswith("2.") and dead.round() == name


def test_half_a_note_is_no_note(tmp_path):
    judge = Notes(tmp_path / "hang", 0)
    name = judge.call(stale=60)
    (tmp_path / "hang" / "rank-1.json").write_text('{"round": ')
    assert judge.read(name) == {}


def test_the_judge_learns_that_there_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Notes(tmp_path / "file" / "hang", 0).call(stale=60)
