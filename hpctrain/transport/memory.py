"""Aligned, lazily zeroed host memory.

Owns plain allocation for transports that have nothing better. Large blocks are fresh pages of the operating system,
which come zeroed and cost nothing until they are touched.
"""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["ALIGNMENT", "allocate"]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_SMALL = 64 * 1024  # bytes; below this a page mapping of its own would be wasteful


def allocate(num_bytes: int) -> memoryview:
    """`num_bytes` of zeroed memory at a multiple of 64 bytes; freed with its last view. Local."""
    if num_bytes == 0:
        return memoryview(bytearray())
    if num_bytes >= _SMALL:
        return memoryview(mmap.mmap(-1, num_bytes))[:num_bytes]
    block = bytearray(num_bytes + ALIGNMENT - 1)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % ALIGNMENT
    return memoryview(block)[start : start + num_bytes]
