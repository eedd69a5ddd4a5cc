"""Lines for people: rank 0 speaks, the other ranks only warn.

Owns the logger "hpctrain": rank 0's lines come as they are, the warnings of all other ranks with `[rank r/N host]`
before them. It goes to stderr, so that stdout holds only what a command was asked for. Handlers that a program has
given the logger stay. Must not know MPI or any engine: the runtime tells it who it is.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["WARNING", "identify", "info", "once", "warning"]

WARNING = logging.WARNING

_logger = logging.getLogger("hpctrain")
_said: set[str] = set()


class _Speaker(logging.Handler):
    """Writes to the stderr of the moment (tests and notebooks replace it), one write a line."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        super().__init__()
        self._rank = rank
        self._prefix = f"[rank {rank}/{size} {host}] " if size > 1 and rank > 0 else ""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints warnings of every rank and the information of rank 0."""
        if self._rank == 0 or record.levelno >= logging.WARNING:
            mark = "warning: " if record.levelno >= logging.WARNING else ""
            text = "".join(f"{self._prefix}{mark}{line}\n" for line in self.format(record).splitlines())
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError):
                self.handleError(record)


def identify(rank: int, size: int, host: str) -> None:
    """Tells the logger whose lines it prints. Local; called at start, may be called again."""
    others = [handler for handler in _logger.handlers if not isinstance(handler, _Speaker)]
    _logger.handlers[:] = [_Speaker(rank, size, host), *others]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def info(text: str) -> None:
    """One line by rank 0. Local; no rank waits for another."""
    _speak(logging.INFO, text)


def warning(text: str) -> None:
    """One line by whichever rank calls. Local."""
    _speak(logging.WARNING, text)


def once(text: str, *, level: int = logging.INFO) -> None:
    """As `info`, but the same text only once in the life of the process. Local."""
    if text not in _said:
        _said.add(text)
        _speak(level, text)


def _speak(level: int, text: str) -> None:
    if not any(isinstance(handler, _Speaker) for handler in _logger.handlers):
        identify(0, 1, "")
    _logger.log(level, "%s", text)
