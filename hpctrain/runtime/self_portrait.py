"""What a rank says of itself when something hangs: its last operations and where its Python stands.

Owns the making of a Note from the recorder and the interpreter, and its printing. Local, read by another thread than
the one it describes: no MPI, no lock. Must not judge.
"""

from __future__ import annotations

import sys
import threading
import time

from hpctrain.collectives.callers import stack_lines
from hpctrain.collectives.recorder import Channel, Operation, Recorder
from hpctrain.runtime.verdict import Call, GroupNote, Note

__all__ = ["blocked", "full_text", "portrait"]

TAIL = 32  # operations of each group in a note


def blocked(recorder: Recorder) -> tuple[Channel, Operation] | None:
    """Where the rank waits for others or works alone, the operation that it has been in for longest; or None."""
    found = [(channel, current) for channel in recorder.channels() if (current := channel.current) is not None]
    return min(found, key=lambda pair: pair[1].blocked, default=None)


def portrait(recorder: Recorder, *, rank: int, host: str, pid: int, thread: int) -> Note:
    """The rank's note; `thread` is the identifier of the thread that is the rank."""
    now = time.monotonic()
    groups = tuple(GroupNote(c.group, c.ranks, c.count, tuple(_call(o, now) for o in c.tail()[-TAIL:]))
                   for c in recorder.channels() if c.tail())
    where, stacks = _stacks(thread)
    current = blocked(recorder)
    return Note(rank, host, pid, recorder.phase, now - recorder.last_event, where, groups,
                None if current is None else (current[0].group, _call(current[1], now)), stacks)


def full_text(note: Note) -> str:
    """Everything in a note, for the report."""
    lines = [f"rank {note.rank} ({note.host}, process {note.pid}): phase {note.phase}, nothing new for "
             f"{note.idle:.1f} s; stands at {note.where}"]
    for group in note.groups:
        lines.append(f"  group {group.name!r}, ranks {list(group.ranks)}: {group.count} collectives; what was last:")
        lines += [f"    {c.sequence or '-':>6} {c.state:8s} {c.seconds:8.1f} s ago  {c.phase:10s} {c}, {c.origin}"
                  for c in group.tail]
    for name, stack in note.stacks.items():
        lines.append(f"  thread {name}, innermost call last:")
        lines += [f"    {line}" for line in stack]
    return "\n".join(lines)


def _call(operation: Operation, now: float) -> Call:
    since = operation.ended or operation.blocked or operation.begun
    return Call(operation.sequence, operation.operation, operation.dtype, operation.count, operation.name,
                operation.state, operation.phase, operation.by.call, str(operation.by), round(now - since, 3))


def _stacks(thread: int) -> tuple[str, dict[str, list[str]]]:
    """Where `thread` stands, and the stacks of all threads but this one."""
    names = {t.ident: t.name for t in threading.enumerate()}
    where, stacks = "?", {}
    for identifier, frame in sys._current_frames().items():
        if identifier == threading.get_ident():
            continue
        stands, lines = stack_lines(frame)
        stacks[names.get(identifier, str(identifier))] = lines
        if identifier == thread:
            ended = bool(lines) and " in _shutdown" in lines[0]
            where = "the end of its program" if ended else stands
    return where, stacks
