"""Who called: the line of the user's program from which a collective came.

Owns the walk up the stack, and what counts as the user's: a file that is neither of this package nor of an installed
library nor of Python itself. Knows nothing of collectives. Keeps no frame alive.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["Caller", "CallerFinder", "stack_lines"]

_OURS, _LIBRARY, _USER = range(3)
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = ("site-packages", "dist-packages")
_PYTHON = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_kinds: dict[str, int] = {}  # of file names; there are only as many as the program has files


class Caller(NamedTuple):
    """A line of the user's program and the function of this package that it called."""

    code: CodeType | None = None
    line: int = 0
    called: CodeType | None = None

    def __str__(self) -> str:
        """`train.py:12 in main`."""
        return "?" if self.code is None else f"{Path(self.code.co_filename).name}:{self.line} in {self.code.co_name}"

    @property
    def call(self) -> str:
        """`Trainer.save`, or "" where it is not known. Python before 3.11 knows only `save`."""
        return "" if self.called is None else str(getattr(self.called, "co_qualname", self.called.co_name))


NOBODY = Caller()


class CallerFinder:
    """Finds callers; remembers how deep the last one was, since looking there first saves the walk."""

    def __init__(self) -> None:
        self._depth = 1

    def find(self) -> Caller:
        """The user's frame that is nearest in the stack. Local.

        Frames of libraries in between (torch calling a hook of ours) are passed over. Where no frame is the user's, the
        nearest one outside this package counts.
        """
        try:
            inner = sys._getframe(self._depth)
        except ValueError:  # the stack is not so deep this time
            return self._walk()
        outer = inner.f_back
        if (outer is not None and _kinds.get(outer.f_code.co_filename) == _USER
                and _kinds.get(inner.f_code.co_filename) == _OURS):
            return Caller(outer.f_code, outer.f_lineno, inner.f_code)
        return self._walk()

    def _walk(self) -> Caller:
        frame: FrameType | None = sys._getframe(1)
        called: CodeType | None = None
        fallback = NOBODY
        depth = 0
        while frame is not None:
            code = frame.f_code
            kind = _kinds.get(code.co_filename)
            if kind is None:
                kind = _kinds[code.co_filename] = _kind(code.co_filename)
            if kind == _OURS:
                called = code
            elif kind == _USER:
                self._depth = depth - 1
                return Caller(code, frame.f_lineno, called)
            elif fallback is NOBODY:
                fallback = Caller(code, frame.f_lineno, called)
            frame = frame.f_back
            depth += 1
        return fallback


def stack_lines(frame: FrameType | None) -> tuple[str, list[str]]:
    """Where a thread stands in the user's program, and its whole stack, innermost call last. Local."""
    lines: list[str] = []
    where = ""
    while frame is not None:
        name, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(name, number).strip()
        lines.append(f"{name}:{number} in {frame.f_code.co_name}" + (f": {text}" if text else ""))
        if not where and _kind(name) == _USER:
            where = f"{Path(name).name}:{number} in {frame.f_code.co_name}" + (f": {text}" if text else "")
        frame = frame.f_back
    return where or (lines[0] if lines else "?"), lines[::-1]


def _kind(name: str) -> int:
    if name.startswith(_PACKAGE):
        return _OURS
    library = name.startswith(("<frozen", *_PYTHON)) or any(part in name for part in _INSTALLED)
    return _LIBRARY if library else _USER
