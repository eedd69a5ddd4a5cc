"""Groups the batches of any loader into the micro-batches of updates.

Owns the rule for the last, partial window of an epoch: it is an update of its own, with its true weight, and nothing of
it leaks into the next epoch. Must not know what a batch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from hpctrain.errors import ConfigError

__all__ = ["windows"]

Item = TypeVar("Item")


def windows(loader: Iterable[Item], accumulation: int) -> Iterator[list[Item]]:
    """Lists of `accumulation` batches of one pass over `loader`, in order; the last may be shorter, none is empty.

    Feed each list to `Trainer.step`: its gradient is divided by the global weight of what is in it, not by
    `accumulation`. Every rank must see the same number of windows.

    Raises:
        ConfigError: accumulation below 1.
    """
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"accumulation = {accumulation!r} must be an integer of at least 1")
    return _windows(iter(loader), accumulation)


def _windows(batches: Iterator[Item], accumulation: int) -> Iterator[list[Item]]:
    while window := list(islice(batches, accumulation)):
        yield window
