"""The order in which samples are seen: a function of (seed, epoch, position), nothing else.

Owns a bijection of 0..n-1 for each epoch, computed element by element in O(1) memory: no permutation array is held or
broadcast, and any rank can ask for any stretch of any epoch. Must not know ranks, batches or files.

The bijection is an alternating Feistel network on the smallest 2^b >= n, followed by cycle walking (a value that falls
outside 0..n-1 is sent through the network again; as 2^b < 2n, that takes fewer than two rounds on average):

    left (b//2 bits) | right (the others)      even rounds:  left  ^= mix(right, key)
                                               odd rounds:   right ^= mix(left, key)

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (cycle walking, Feistel). The mixing
function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). It shuffles; it does not encrypt.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

__all__ = ["permute", "sample_ids"]

ROUNDS = 8


def sample_ids(start: int, stop: int, num_samples: int, seed: int) -> np.ndarray:
    """The samples at the global counters [start, stop): counter g is position g % n of epoch g // n.

    Returns:
        int64 array of length stop - start with values in 0..num_samples-1.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"counters [{start}, {stop}) must be a half-open interval from 0 on")
    pieces = [np.empty(0, np.int64)]
    while start < stop:
        epoch, position = divmod(start, num_samples)
        end = min(stop, (epoch + 1) * num_samples)
        positions = np.arange(position, position + end - start, dtype=np.int64)
        pieces.append(permute(positions, num_samples, seed, epoch))
        start = end
    return np.concatenate(pieces)


def permute(positions: np.ndarray, num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at `positions` (each in 0..num_samples-1) of `epoch`; int64, same shape."""
    if not 1 <= num_samples < 1 << 62:
        raise ValueError(f"num_samples = {num_samples} must be in 1..2^62-1")
    keys = np.frombuffer(blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest(), "<u8")
    num_bits = (num_samples - 1).bit_length()
    ids = _network(positions.astype(np.uint64), num_bits, keys)
    outside = ids >= num_samples
    while outside.any():
        ids[outside] = _network(ids[outside], num_bits, keys)
        outside = ids >= num_samples
    return ids.astype(np.int64)


def _network(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    low = np.uint64(num_bits - num_bits // 2)
    right_mask, left_mask = np.uint64((1 << int(low)) - 1), np.uint64((1 << num_bits // 2) - 1)
    left, right = values >> low, values & right_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (_mix(left ^ key) & right_mask)
        else:
            left = left ^ (_mix(right ^ key) & left_mask)
    return (left << low) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The 64-bit finaliser of SplitMix64; wraps around on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
