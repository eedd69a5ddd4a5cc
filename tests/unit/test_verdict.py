"""What a standing job's notes say: who differs, who is missing, who is legally at work."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hpctrain.runtime.limits import Watch
from hpctrain.runtime.verdict import Call, GroupNote, Note, judge


def call(sequence: int, operation: str = "all_reduce sum", state: str = "waiting", count: int = 101,
         call: str = "Group.all_reduce", by: str = "train.py:12 in main") -> Call:
    return Call(sequence, operation, "float32", count, "x", state, "step", call, by, 5.0)


def note(rank: int, *calls: Call, idle: float = 5.0, phase: str = "step", ranks: tuple[int, ...] = (0, 1, 2),
         group: str = "world") -> Note:
    current = calls[-1] if calls and calls[-1].state in ("waiting", "working") else None
    return Note(rank, f"node{rank}", 100 + rank, phase, idle, f"data.py:{rank} in read: time.sleep(9)",
                (GroupNote(group, ranks, len(calls), calls),), None if current is None else (group, current))


def read(notes: list[Note], size: int = 3, *, ending: bool = True, **limits: Any) -> tuple[str, str]:
    verdict = judge({n.rank: n for n in notes}, size, Watch(**{"limit": 5.0, **limits}), ending=ending)
    return verdict.kind, "\n".join(verdict.lines)


DONE = call(1, state="finished")


def test_different_lengths():
    kind, text = read([note(0, DONE, call(2)), note(1, DONE, call(2)), note(2, DONE, call(2, count=100, by="b.py:3"))])
    assert kind == "mismatch"
    assert "operation 2 of group 'world'" in text
    assert 'ranks 0-1: all_reduce sum of 101 x float32 "x", Group.all_reduce called at train.py:12 in main' in text
    assert 'rank 2: all_reduce sum of 100 x float32 "x", Group.all_reduce called at b.py:3' in text


def test_a_difference_long_ago_is_found_where_it_began():
    kind, text = read([note(0, call(1, state="finished", count=7), call(2)), note(1, DONE, call(2)), note(2, DONE)])
    assert kind == "mismatch" and "operation 1 of" in text and "rank 2 went on; not in a collective" in text


def test_a_difference_counts_though_a_rank_works():
    assert read([note(0, call(1, "on_root 0", "working")), note(1, call(1)), note(2, call(1))])[0] == "mismatch"


def test_the_same_names_in_other_groups_are_no_difference():
    notes = [note(0, call(1), ranks=(0, 1), group="world.1"), note(1, call(1), ranks=(0, 1), group="world.1"),
             note(2, call(1, count=7), ranks=(2, 3), group="world.1")]
    assert read(notes)[0] == "missing"


def test_one_rank_sleeps():
    kind, text = read([note(0, DONE, call(2)), note(1, DONE, call(2)), note(2, DONE, idle=5.2, phase="data")])
    assert kind == "missing"
    assert "ranks 0-1: waiting in all_reduce sum" in text
    assert "rank 2: not in a collective (phase data, node2); its last was operation 1" in text
    assert "its Python stands at data.py:2 in read: time.sleep(9)" in text
    assert "all_reduce is collective over ranks 0-2" in text


def test_a_rank_within_its_own_limit_is_legally_at_work():
    notes = [note(0, DONE, call(2)), note(1, DONE, call(2)), note(2, DONE, idle=5.2, phase="data")]
    assert read(notes, phases={"data": 60.0})[0] == "legal"
    assert read(notes, phases={"data": None})[0] == "legal"
    assert read(notes, phases={"data": 5.0})[0] == "missing"
    assert read(notes, phases={"data": 60.0}, ending=False)[0] == "missing", "a report is wanted all the same"


def test_work_on_root_is_legal_for_ever():
    root = note(0, call(2, "on_root 0", "working"), idle=1e6)
    waiting = [note(rank, call(2, "on_root 0")) for rank in (1, 2)]
    assert read([root, *waiting])[0] == "legal"


def test_a_rank_that_does_not_answer():
    kind, text = read([note(0, DONE, call(2)), note(1, DONE, call(2))])
    assert kind == "missing" and "rank 2: no answer" in text


def test_all_in_the_same_place():
    kind, text = read([note(rank, call(1)) for rank in range(3)])
    assert kind == "together" and "look at the network" in text


def test_it_fits_on_a_screen():
    notes = [note(rank, DONE, call(2), ranks=tuple(range(1000))) for rank in range(0, 999, 2)]
    notes += [note(rank, DONE, ranks=tuple(range(1000))) for rank in range(1, 999, 2)]
    _, text = read(notes, size=1000)
    assert len(text.splitlines()) < 24 and "more lines in the report" in text
    assert max(len(line) for line in text.splitlines()) < 600


def test_notes_survive_json():
    before = note(1, DONE, call(2))
    assert Note.from_dict(json.loads(json.dumps(before.to_dict()))) == before
    assert asdict(before)["current"][0] == "world"
