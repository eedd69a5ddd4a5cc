"""Why a job stands still, from what its ranks say of themselves.

Owns the note that each rank writes and the reading of all notes together. Pure: no thread, no file, no clock. What it
says must fit on one screen, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.collectives.fingerprint import describe_call, name_ranks
from hpctrain.runtime.limits import Watch

__all__ = ["Call", "GroupNote", "Note", "Verdict", "judge"]

_LINES = 16  # different things that ranks may be doing, in a verdict


@dataclass(frozen=True)
class Call:
    """One collective of one rank (see `collectives.recorder`); `seconds` since it came to its state."""

    sequence: int
    operation: str
    dtype: str
    count: int
    name: str
    state: str
    phase: str
    call: str
    by: str
    seconds: float

    @property
    def fingerprint(self) -> tuple[str, str, int]:
        """What must be equal on all ranks."""
        return self.operation, self.dtype, self.count

    def __str__(self) -> str:
        """`all_reduce sum of 101 x float32 "x"`."""
        return describe_call(self.operation, self.dtype, self.count, self.name)

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks, and not a collective."""
        return self.sequence == 0

    @property
    def origin(self) -> str:
        """`Trainer.save called at train.py:12 in main`."""
        return f"{self.call or self.operation} called at {self.by}"


@dataclass(frozen=True)
class GroupNote:
    """A rank's last operations on one group; `ranks` are those of the world."""

    name: str
    ranks: tuple[int, ...]
    count: int
    tail: tuple[Call, ...]


@dataclass(frozen=True)
class Note:
    """What a rank says of itself. `current` is (group, operation) in which it is blocked or at work, or None."""

    rank: int
    host: str
    pid: int
    phase: str
    idle: float
    where: str
    groups: tuple[GroupNote, ...] = ()
    current: tuple[str, Call] | None = None
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Note:
        """The note that `to_dict` gave, after a way through JSON."""
        groups = tuple(GroupNote(g["name"], tuple(g["ranks"]), g["count"], tuple(Call(**c) for c in g["tail"]))
                       for g in values["groups"])
        current = values["current"]
        return cls(**{**values, "groups": groups,
                      "current": None if current is None else (current[0], Call(**current[1]))})

    @property
    def waits(self) -> bool:
        """Whether it is blocked in a collective."""
        return self.current is not None and self.current[1].state == "waiting"

    @property
    def works(self) -> bool:
        """Whether it runs the function of an `on_root`."""
        return self.current is not None and self.current[1].state == "working"


@dataclass(frozen=True)
class Verdict:
    """What the notes say.

    `kind` is "legal" (some rank is at work as it may be), "mismatch" (certain to hang), "missing", or "together" (all
    wait in the same operation, which is nobody's fault in the program).
    """

    kind: str
    lines: tuple[str, ...] = ()


def judge(notes: Mapping[int, Note], size: int, watch: Watch, *, ending: bool) -> Verdict:
    """Reads the notes of a job of `size` ranks, some of which may be missing; `ending`: a limit is exceeded."""
    mismatch = _mismatch(notes)
    if mismatch is not None:
        name, ranks, sequence, calls = mismatch
        head = f"operation {sequence} of group {name!r} is not the same on all its ranks:"
        lines = [*_list_calls(calls), *_standing(notes, calls), *_collective(ranks, calls.values())]
        return Verdict("mismatch", (head, *lines))
    if any(note.works for note in notes.values()):
        return Verdict("legal")
    if ending and any(not note.waits and _may_go_on(note, watch) for note in notes.values()):
        return Verdict("legal")
    states: dict[str, list[int]] = {}
    for rank in range(size):
        states.setdefault(_state(notes.get(rank)), []).append(rank)
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in states.items()]
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"  ... and {len(lines) - _LINES} more lines in the report"]
    waiting = {rank: note.current for rank, note in notes.items() if note.waits and note.current is not None}
    places = {(name, _ranks(notes[rank], name), call.sequence) for rank, (name, call) in waiting.items()}
    together = len(waiting) == size and len(places) == 1 and not any(call.is_message for _, call in waiting.values())
    if together:
        lines.append("  all ranks are in the same operation: look at the network and the MPI library")
    for name, ranks, _ in sorted(place for place in places if place[2])[:4]:
        lines += _collective(ranks, [call for rank, (group, call) in waiting.items() if not call.is_message
                                     and (group, _ranks(notes[rank], group)) == (name, ranks)])
    return Verdict("together" if together else "missing", tuple(lines))


def _may_go_on(note: Note, watch: Watch) -> bool:
    limit = watch.limit_of(note.phase)
    return limit is None or note.idle < limit


def _mismatch(notes: Mapping[int, Note]) -> tuple[str, tuple[int, ...], int, dict[int, Call]] | None:
    """The first operation of a group on which its ranks differ: (group, its ranks, sequence, rank -> its call)."""
    seen: dict[tuple[str, tuple[int, ...], int], dict[int, Call]] = {}
    for rank, note in notes.items():
        for group in note.groups:
            for call in group.tail:
                if call.is_message:
                    continue
                seen.setdefault((group.name, group.ranks, call.sequence), {})[rank] = call
    for (name, ranks, sequence), calls in sorted(seen.items(), key=lambda item: item[0][2]):
        if len({call.fingerprint for call in calls.values()}) > 1:
            return name, ranks, sequence, calls
    return None


def _list_calls(calls: Mapping[int, Call]) -> list[str]:
    kinds: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        kinds.setdefault(f"{call}, {call.origin}", []).append(rank)
    return [f"  {name_ranks(ranks)}: {text}" for text, ranks in kinds.items()][:_LINES]


def _standing(notes: Mapping[int, Note], calls: Mapping[int, Call]) -> list[str]:
    """Where those ranks are that went on after their part of it."""
    return [f"  rank {rank} went on; {_state(notes[rank])}" for rank, call in sorted(calls.items())
            if call.state == "finished"][:4]


def _ranks(note: Note, group: str) -> tuple[int, ...]:
    return next((g.ranks for g in note.groups if g.name == group), ())


def _collective(ranks: Sequence[int], calls: Iterable[Call]) -> list[str]:
    """Which ranks must make these calls."""
    names = sorted({call.call.split(".")[-1] or call.operation for call in calls})
    return [f"  {name} is collective over {name_ranks(ranks)}: all of them must call it, in the same order as their "
            "other collectives" for name in names[:4]]


def _state(note: Note | None) -> str:
    if note is None:
        return ("no answer: its process is gone, stopped, at work in other collectives, or in C code that holds "
                "Python's lock; or it does not see the directory of the report")
    if note.current is not None and note.waits:
        name, call = note.current
        return f"waiting in {call}, {_place(name, call)}, {call.origin}"
    last = [(group.name, group.tail[-1]) for group in note.groups if group.tail]
    if not last:
        return f"in phase {note.phase}, no collective yet; its Python stands at {note.where}"
    name, call = min(last, key=lambda pair: pair[1].seconds)
    return (f"not in a collective (phase {note.phase}, {note.host}); its last was {_place(name, call)}, "
            f"{call}, {call.origin}; its Python stands at {note.where}")


def _place(group: str, call: Call) -> str:
    return f"a message in group {group!r}" if call.is_message else f"operation {call.sequence} of group {group!r}"
