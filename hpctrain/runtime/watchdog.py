"""No silent hang: a thread that looks whether this rank waits for too long, and finds out with the others why.

Owns the thread and what it does at which time; limits, notes, verdicts and their words live in files of their own. It
makes no MPI call, but for the abort at the end. Ranks reach each other through small files (`notes`), which do not
exist while all is well: a rank looks for them only when nothing has happened on it for a while.

    time of waiting   0 ......... report ................ limit
    rank that waits               round of notes:         round of notes:
                                  legal, or a report      legal, or a report and the end of the job
    other ranks       answer a round with their note
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.collectives.recorder import Channel, Operation, Recorder
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.notes import Notes
from hpctrain.runtime.self_portrait import blocked, full_text, portrait
from hpctrain.runtime.verdict import Note, Verdict, judge

__all__ = ["Watchdog"]

STUCK = 3.0  # seconds that ending the job may take before this process ends itself
FAST, SLOW = 0.1, 5.0  # seconds between two looks, at least and at most
QUIET = 5.0  # seconds without anything new, at most, after which a rank looks for notes


class Watchdog:
    """The watch over one rank. Local; one daemon thread from `start` to `close`.

    `end(code)` ends the whole job; it is called in the thread. Made by the thread that is the rank.
    """

    def __init__(self, watch: Watch, recorder: Recorder, *, rank: int, size: int, host: str,
                 end: Callable[[int], None]) -> None:
        self._watch, self._recorder = watch, recorder
        self._rank, self._size, self._host, self._end = rank, size, host, end
        shortest = watch.shortest or SLOW * 20
        self._tick = min(max(shortest / 20, FAST), SLOW)
        self._quiet = min(shortest / 4, QUIET)
        self._patience = self._quiet + 3 * self._tick + 1.0
        self._notes: Notes | None = None
        self._due: tuple[Operation | None, float] = (None, 0.0)
        self._init_due = watch.report
        self._beat = self._silent_until = 0.0
        self._answered = ""  # the latest round that this rank took part in
        self._closed = threading.Event()
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hpctrain watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch, alone at first. Does nothing where everything is off."""
        if self._watch.shortest is not None:
            self._thread.start()

    def join_ranks(self, rank: int, size: int, end: Callable[[int], None], path: Path) -> None:
        """From now on ranks find each other at `path`, which is the same for all."""
        self._rank, self._size, self._end = rank, size, end
        self._notes = Notes(path, rank)

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._tick):
            try:
                self._look(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the watch must not end a job by a fault of its own
                self._say(f"the watch over hangs failed and is off: {type(error).__name__}: {error}")
                return

    def _look(self, now: float) -> None:
        if self._notes is None:
            self._look_alone(now - self._recorder.phase_since)
            return
        found = blocked(self._recorder)
        if found is not None and found[1].state == "working":
            self._show_life(*found, now)
        if found is not None and found[1].state == "waiting" and now >= max(self._due_of(found[1]), self._silent_until):
            self._alarm(*found, now)
        elif now - self._recorder.last_event >= self._quiet:
            self._answer()

    def _due_of(self, operation: Operation) -> float:
        if self._due[0] is not operation:
            limit = self._watch.limit_of(operation.phase)
            first = min((x for x in (limit, self._watch.report) if x is not None), default=float("inf"))
            self._due = operation, operation.blocked + first
        return self._due[1]

    def _alarm(self, channel: Channel, operation: Operation, now: float) -> None:
        """This rank has waited for long: why? Ends the job, reports, or puts the question off."""
        notes = self._notes
        assert notes is not None
        waited, limit = now - operation.blocked, self._watch.limit_of(operation.phase)
        ending = limit is not None and waited >= limit
        problem = ""
        try:
            name = notes.call(stale=2 * self._patience)
            if name is None:
                self._answer()
                return
            everyone = self._collect(notes, name)
        except OSError as error:
            everyone, problem = {self._rank: self._portrait()}, f"  ranks could not be asked: {error}\n"
        verdict = judge(everyone, self._size, self._watch, ending=ending)
        notes.clear()
        again = max(2 * self._tick, (limit if limit is not None else self._watch.report or waited) / 4)
        if self._closed.is_set() or channel.current is not operation or verdict.kind == "legal":
            self._due = operation, now + again
            return
        ending = ending or verdict.kind == "mismatch"
        self._report(verdict, everyone, waited, operation, problem, ending)
        if ending:
            self._end_job()
        next_report = operation.blocked + 2 * waited
        self._due = operation, next_report if limit is None else min(next_report, operation.blocked + limit)

    def _collect(self, notes: Notes, name: str) -> dict[int, Note]:
        """The notes of all ranks that answer soon enough."""
        give_up = time.monotonic() + self._patience
        while notes.count() < self._size - 1 and time.monotonic() < give_up and not self._closed.wait(self._tick / 4):
            pass
        found = {rank: Note.from_dict(note) for rank, note in notes.read(name).items()}
        return {**found, self._rank: self._portrait()}

    def _answer(self) -> None:
        """Writes this rank's note where a round is under way."""
        assert self._notes is not None
        name = self._notes.round()
        if name is not None and name != self._answered:  # once: the judge may be removing the notes by now
            self._answered = name
            self._notes.write(name, self._portrait().to_dict())
            self._silent_until = time.monotonic() + self._patience  # time for the judge to speak

    def _portrait(self) -> Note:
        return portrait(self._recorder, rank=self._rank, host=self._host, pid=self._pid, thread=self._main)

    def _report(self, verdict: Verdict, everyone: dict[int, Note], waited: float, operation: Operation,
                problem: str, ending: bool) -> None:
        assert self._notes is not None
        limit = self._watch.limit_of(operation.phase)
        why = f"limit {limit:g} s" if limit is not None else "no limit is set"
        why = "the ranks differ" if verdict.kind == "mismatch" else why
        outcome = "the job is ended" if ending else "the job goes on"
        head = f"no progress: rank {self._rank} has waited {waited:.1f} s in phase {operation.phase} ({why}); {outcome}"
        text = "\n".join([head, *verdict.lines])
        path = self._notes.path.with_suffix(".txt")
        try:
            with path.open("a") as file:
                file.write("\n\n".join([text, *(full_text(note) for _, note in sorted(everyone.items()))]) + "\n\n")
            where = f"  last operations and Python stacks of {len(everyone)} of {self._size} ranks: {path}"
        except OSError as error:
            where = f"  no report could be written: {error}"
        self._say(f"{text}\n{problem}{where}")

    def _show_life(self, channel: Channel, operation: Operation, now: float) -> None:
        """One line now and then while the others wait for this rank's work."""
        beat = self._watch.heartbeat
        since = now - operation.blocked
        if beat is not None and now >= max(self._beat, operation.blocked + (self._watch.shortest or beat)):
            self._beat = now + beat
            self._say(f"rank {self._rank} is at work alone for {since:.0f} s ({operation.by}); the other ranks of "
                      f"group {channel.group!r} wait for its result")

    def _look_alone(self, waited: float) -> None:
        """Before the ranks know each other: MPI itself may hang."""
        limit = self._watch.limit_of("init")
        ending = limit is not None and waited >= limit
        if not ending and (self._init_due is None or waited < self._init_due):
            return
        self._init_due = 2 * waited
        outcome = "the job is ended" if ending else "still trying"
        self._say(f"no progress: rank {self._rank} has been in hpctrain.start for {waited:.0f} s; {outcome}. Do all "
                  f"ranks run, and with one MPI library (hpctrain doctor)?\n{full_text(self._portrait())}")
        if ending:
            self._end_job()

    def _end_job(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(STUCK, exit=True, file=2)
        self._end(1)

    def _say(self, text: str) -> None:
        prefix = f"[rank {self._rank}/{self._size} {self._host}] "
        with contextlib.suppress(Exception):
            sys.stderr.write("".join(f"{prefix if i == 0 else ''}{line}\n" for i, line in enumerate(text.splitlines())))
            sys.stderr.flush()
