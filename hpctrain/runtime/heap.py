"""Memory that a step frees stays with the process, so that the next step need not ask the system for it again.

    step    take ... free                               glibc gives the free end of its heap back to the system, ...
    step    take (the system clears each page) ...      ... and every page of it costs about as much as a copy of it

What the set-up freed no step will need: it goes back once, when a trainer is made.

Owns this setting of glibc's malloc; other allocators, and values that the user has set, are left alone.
"""

from __future__ import annotations

import ctypes

from hpctrain import env

__all__ = ["give_back", "keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names in <malloc.h>
_NEVER = 2**31 - 1
#: Bytes from which malloc asks the system for each piece by itself: the most to which glibc moves it by itself.
_LARGE = 32 * 2**20


def keep_freed_memory() -> bool:
    """Returns whether it was done. Local; for the rest of the process."""
    if env.malloc_is_set():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back() -> None:
    """All that is free now goes back to the system, wherever it lies in the heap. Local; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
