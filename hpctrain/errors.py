"""Every error that hpctrain raises on purpose.

Owns the exception classes. Knows nothing of who raises them. Errors of the user (a wrong value, a wrong
launch) derive from `HpctrainError` and, where Python has a family for them, from ValueError or RuntimeError,
so that `except ValueError` works. Programmer errors are `assert`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "HpctrainError",
    "LaunchError",
    "MismatchError",
    "NonFiniteError",
    "PlanError",
    "RemoteError",
    "TransportError",
    "UnsupportedError",
    "choices",
    "nearest",
]


class HpctrainError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(HpctrainError, ValueError):
    """An option has a value that is not legal. The message names the option, the value and the legal ones."""


class UnsupportedError(HpctrainError, ValueError):
    """A combination that is not offered (a dtype with an operation, say). Nothing ran before this was raised."""


class PlanError(HpctrainError, ValueError):
    """A plan is wrong: an element reduced twice, a send without a receive. Raised by the checker."""


class LaunchError(HpctrainError, RuntimeError):
    """The job was started in a way that cannot work. The message says how to start it."""


class MismatchError(HpctrainError, RuntimeError):
    """Ranks of one group called different collectives, or hold different arrays where they must be the same.

    Nothing was moved; raised on all ranks alike.
    """


class TransportError(HpctrainError, RuntimeError):
    """A transport is closed or its peer is gone."""


class CheckpointError(HpctrainError, RuntimeError):
    """A checkpoint cannot be written, or none that is whole can be read."""


class NonFiniteError(HpctrainError, ArithmeticError):
    """Gradients were not finite too many times in a row."""


class RemoteError(HpctrainError, RuntimeError):
    """Another rank failed with an exception that cannot be built again here; the message holds its text."""


def choices(values: Iterable[object]) -> str:
    """The legal values of an option as one readable string: `'a', 'b' or 'c'`."""
    shown = [repr(v) for v in values]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1] if shown else "(none)"


def nearest(name: str, legal: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the legal name closest to `name`, or an empty string."""
    close = get_close_matches(name, list(legal), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
