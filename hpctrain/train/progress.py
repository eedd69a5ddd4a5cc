"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere.

Owns the look of it. Must not know how the numbers come about. Only rank 0 shows anything; the other ranks hold a
`Silent`, so the loop need not ask who it is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpctrain import env

__all__ = ["Bar", "Lines", "Shown", "Silent", "make_progress"]


@dataclass(frozen=True)
class Shown:
    """The numbers of one step. `loss` in nats per token, `seconds_left` an estimate."""

    step: int
    loss: float
    lr: float
    gradient_norm: float
    tokens_per_second: float
    seconds_left: float

    def __str__(self) -> str:
        """The numbers as words."""
        return (f"loss {self.loss:.4f} lr {self.lr:.1e} |g| {self.gradient_norm:.2f} "
                f"{self.tokens_per_second:,.0f} tokens/s {_clock(self.seconds_left)} left")


class Display(Protocol):
    """What the loop talks to."""

    def show(self, shown: Shown) -> None:
        """A step is done."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """The end of the run."""


class Silent:
    """Shows nothing."""

    def show(self, shown: Shown) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """A line every `every` steps, and for the first and the last."""

    def __init__(self, total: int, every: int, console: Console) -> None:
        self._total, self._every, self._console = total, every, console
        self._first = True

    def show(self, shown: Shown) -> None:
        """A line, if it is this step's turn."""
        if self._first or shown.step % self._every == 0 or shown.step == self._total:
            self.note(f"step {shown.step:>{len(str(self._total))}}/{self._total} {shown}")
        self._first = False

    def note(self, text: str) -> None:
        """The line, at once."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def close(self) -> None:
        """Nothing to end."""


class Bar:
    """One line that is drawn anew, at most four times a second and by no thread of its own: cores are for training."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}"), console=console, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False)  # a traceback must not wait for a bar
        self._task = self._progress.add_task("", total=total, completed=done, numbers="")
        self._total, self._drawn = total, 0.0
        self._progress.start()
        console.show_cursor(True)  # a job that is killed could not give it back

    def show(self, shown: Shown) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=shown.step, numbers=str(shown))
        if time.monotonic() - self._drawn > 0.25 or shown.step == self._total:
            self._progress.refresh()
            self._drawn = time.monotonic()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state of the bar on the screen."""
        self._progress.stop()


def make_progress(kind: str, *, rank: int, total: int, done: int, every: int) -> Display:
    """The display for this rank: `kind` is "bar", "lines", "off" or "auto" (a bar if a person watches). Local."""
    if rank > 0 or kind == "off":
        return Silent()
    console = Console()
    watched = console.is_terminal and not console.is_dumb_terminal and (env.launch() is None or _parent_has_terminal())
    return Bar(total, done, console) if kind == "bar" or (kind == "auto" and watched) else Lines(total, every, console)


def _parent_has_terminal() -> bool:
    """Whether our launcher's own output is a terminal.

    mpirun gives each rank a pseudo-terminal even where its own output goes to a file or a pipe, so ours says nothing.
    On other nodes than the launcher's, the parent is a daemon without a terminal, and lines are shown.
    """
    try:
        return os.isatty(1) and str(Path(f"/proc/{os.getppid()}/fd/1").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
