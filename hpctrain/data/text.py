"""Samples of a text as arrays, and the bigram entropy that a language model has to beat.

Owns the cut of a row of tokens into samples and batches. Must not know files (it takes any array, memory-mapped or
not), ranks beyond a number, or models.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.errors import ConfigError
from hpctrain.plan.split import part

__all__ = ["TokenWindows", "bigram_entropy", "validation_batches"]


class TokenWindows:
    """Non-overlapping samples of a row of tokens; together their targets are tokens 1 .. len(self) * length.

        tokens    t0 t1 t2 t3 t4 t5 t6 ...     length 3
        sample 0  inputs t0 t1 t2   targets t1 t2 t3
        sample 1  inputs t3 t4 t5   targets t4 t5 t6

    Each token but the first is a target exactly once; a rest shorter than a sample is left out. `tokens` is kept, not
    copied: a memory map is read as samples are asked for.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length
        self.num_samples = max(0, len(tokens) - 1) // length
        if not self.num_samples:
            raise ConfigError(f"a text of {len(tokens)} tokens is too short for one sample of data.length = {length} "
                              "(model.context when not given) and the token that follows it")

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the samples `ids`: two int64 arrays of shape (len(ids), length)."""
        ids = np.asarray(ids, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_samples):
            raise ValueError(f"sample ids must be in 0..{self.num_samples - 1}")
        rows = np.empty((ids.size, self.length + 1), np.int64)
        for row, start in zip(rows, ids * self.length, strict=True):
            row[:] = self.tokens[start:start + self.length + 1]
        return rows[:, :-1], rows[:, 1:]


def validation_batches(windows: TokenWindows, batch: int, *, rank: int, size: int,
                       limit: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of `limit` samples spread evenly over the text (0: all), in batches of up to `batch`. Local.

    Ranks may get different numbers of batches, or none; the union over ranks does not depend on `size`.
    """
    count = min(limit or len(windows), len(windows))
    chosen = np.arange(count, dtype=np.int64) * len(windows) // count
    start, stop = part(count, size, rank)
    for first in range(start, stop, batch):
        yield windows.batch(chosen[first:min(first + batch, stop)])


def bigram_entropy(tokens: np.ndarray, vocabulary: int = 256) -> float:
    """H(next | previous) of a text in nats per token, from the counts of neighbouring pairs in this very text.

    With c(a, b) the number of places where b follows a, c(a) its sum over b and N the number of pairs:

        H = - sum over a, b of  c(a, b) / N * ln( c(a, b) / c(a) )

    That is the mean loss on this text of the best table that predicts a byte from the one before, a table that was
    fitted on the text itself: no bigram model, wherever it was trained, has a lower loss on it. A model with a lower
    loss uses more context than one byte. 0 for a text of fewer than two tokens.
    """
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    chunk = 1 << 24  # pairs at a time, so that a large memory map is not copied whole
    for start in range(0, len(tokens) - 1, chunk):
        piece = np.asarray(tokens[start:start + chunk + 1], np.int64)
        counts += np.bincount(piece[:-1] * vocabulary + piece[1:], minlength=counts.size)
    table = counts.reshape(vocabulary, vocabulary)
    previous = np.repeat(table.sum(axis=1), np.count_nonzero(table, axis=1))
    pairs = table[table > 0]
    return float(-(pairs * np.log(pairs / previous)).sum() / pairs.sum()) if pairs.size else 0.0
