"""Who lends the arrays that a rank keeps for itself, and hears when a part of one is needed or is not for a while.

Owns the protocol and the plain lender. Must not know what the arrays hold.
"""

from __future__ import annotations

from typing import Protocol

from hpctrain.contracts import Array, Arrays

__all__ = ["Lender", "Plain"]


class Lender(Protocol):
    """Lends arrays. All calls are local."""

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        """A flat array of zeros that stays valid: `name` ("gradient", ...) of this rank's part of a flat buffer."""

    def fetch(self, view: Array) -> None:
        """A contiguous part of an array is needed soon. Never blocks."""

    def release(self, view: Array) -> None:
        """A contiguous part of an array is not needed for a while. What was lent by somebody else is left alone."""

    def settle(self) -> None:
        """Nothing is needed for a while: memory is given back. Blocks until it is."""


class Plain:
    """Plain memory of the array library: it is always there."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        """New zeroed memory."""
        return self._arrays.zeros(count, dtype)

    def fetch(self, view: Array) -> None:
        """Nothing to do."""

    def release(self, view: Array) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do."""
