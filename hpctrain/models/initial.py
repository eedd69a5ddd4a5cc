"""Initial values as a function of (seed, parameter name, element index).

Owns counter-based random numbers: element i of a parameter is the same number whatever slice is asked for, on however
many ranks the parameter lies, and in whatever order parameters are made. Must not know layouts or libraries.

A block of the Philox generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is four 64-bit
numbers; block b gives elements 4b .. 4b+3, two pairs through the Box-Muller transform. Every element thus costs a fixed
number of draws, and its block is found by division.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

__all__ = ["normal"]

CHUNK = 1 << 20  # elements made at a time, a multiple of 4; bounds the memory for temporary arrays


def normal(seed: int, name: str, start: int, stop: int, std: float = 1.0) -> np.ndarray:
    """Elements [start, stop), in C order, of the parameter `name`: normal with mean 0 and deviation `std`. Local.

    Returns:
        float64 array of length stop - start.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"[{start}, {stop}) must be a half-open interval from 0 on")
    key = int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=16).digest(), "little")
    values = np.empty(stop - start)
    for first in range(start - start % 4, stop, CHUNK):
        last = min(first + CHUNK, stop)
        block = _normals(key, first // 4, -(-(last - first) // 4))
        begin = max(first, start)
        values[begin - start:last - start] = block[begin - first:last - first]
    return values * std


def _normals(key: int, block: int, num_blocks: int) -> np.ndarray:
    generator = np.random.Philox(key=key, counter=block)
    raw = generator.random_raw(4 * num_blocks).reshape(-1, 2)
    uniform = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1), both ends excluded: the logarithm is finite
    radius, angle = np.sqrt(-2 * np.log(uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
