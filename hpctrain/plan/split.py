"""Splitting n items over p parts: the one rule by which everything here is divided.

Part i of split(n, p) has n // p items, one more for i < n % p:

    split(10, 4)      3 3 2 2
    bounds(10, 4)     0 3 6 8 10

Parts may be empty (n < p). Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["bounds", "intervals", "part"]


def part(count: int, num_parts: int, index: int) -> tuple[int, int]:
    """The half-open interval [start, stop) of part `index`, in O(1)."""
    if num_parts < 1:
        raise ValueError(f"num_parts = {num_parts} must be at least 1")
    if count < 0:
        raise ValueError(f"count = {count} must not be negative")
    if not 0 <= index < num_parts:
        raise ValueError(f"index = {index} must be in 0..{num_parts - 1}")
    quotient, remainder = divmod(count, num_parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


def bounds(count: int, num_parts: int) -> tuple[int, ...]:
    """The num_parts + 1 borders: part i is [bounds[i], bounds[i + 1])."""
    return (*(part(count, num_parts, i)[0] for i in range(num_parts)), count)


def intervals(count: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """All parts in order."""
    return (part(count, num_parts, i) for i in range(num_parts))
