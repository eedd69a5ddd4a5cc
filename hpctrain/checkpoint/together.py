"""File-system work under a group: whatever fails on one rank is a CheckpointError on all.

Owns the translation of OSError into CheckpointError, inside the group's own agreement. Knows nothing of the format.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.collectives import Group

__all__ = ["agreed", "as_checkpoint_error", "on_root"]

_ADVICE = {
    errno.ENOSPC: "free some room, or save to another file system",
    errno.EDQUOT: "your quota is used up: free some room, or save to another file system",
    errno.EACCES: "the directory is not writable for this user",
    errno.EROFS: "the file system is mounted read-only",
}


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Turns an OSError of its body into a CheckpointError with the file and what can be done. Local."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        raise CheckpointError(f"checkpoint: {error}" + (f"; {advice}" if advice else "")) from error


@contextmanager
def agreed(group: Group) -> Iterator[None]:
    """`group.agree()` with errors of the file system as CheckpointError. Collective over the group."""
    with group.agree(), as_checkpoint_error():
        yield


def on_root(group: Group, function: Callable[[], Any]) -> Any:
    """`group.on_root` with errors of the file system as CheckpointError. Collective over the group."""

    def guarded() -> Any:
        with as_checkpoint_error():
            return function()

    return group.on_root(guarded)
