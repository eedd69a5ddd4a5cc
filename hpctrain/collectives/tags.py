"""The tags of a group's collectives: how their messages tell one call from another.

Knows nothing of groups and transports. Tags lie in 0..32511; a group has the rest, up to 32767, for other messages.
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

__all__ = ["fingerprint", "tag_of"]

_NUMBERS, _KINDS = 1016, 32


def tag_of(number: int, title: str, dtype: str = "", count: int = 0) -> int:
    """The tag of collective `number` of a group, which is `title` on `count` elements of `dtype`.

    Different for 1016 collectives in a row, and for most different calls at the same number. Where ranks call different
    collectives, their messages then do not meet: instead of reading each other's data they wait, and the watchdog tells
    who differs. One pair of different calls in 32 shares its tag; there, different lengths are still an error.
    """
    return number % _NUMBERS * _KINDS + fingerprint(title, dtype, count) % _KINDS


@lru_cache(maxsize=4096)
def fingerprint(title: str, dtype: str, count: int) -> int:
    """A number that is different for almost all different calls."""
    return crc32(f"{title} {dtype} {count}".encode())
