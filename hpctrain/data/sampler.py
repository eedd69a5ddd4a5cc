"""Which samples this rank runs in which update.

Owns the cut of the global order into global batches, ranks and micro-batches. The whole state is ONE integer: the
global sample counter, the number of samples that all ranks together have been given since the start of training
(including those that a dropped tail skips). It means the same on any number of ranks.

    n = 10 samples, global batch 4           epoch 0                      epoch 1
    straddle (default)                       0 1 2 3 | 4 5 6 7 | 8 9      0 1 | 2 3 4 5 | ...     10 = one update
    keep      the tail is a smaller batch    0 1 2 3 | 4 5 6 7 | 8 9   |  0 1 2 3 | ...           with its true weight
    drop      the tail is skipped            0 1 2 3 | 4 5 6 7 |       |  0 1 2 3 | ...           not the same two in
                                                                                                  each epoch
Must not know files, tensors or process groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np

from hpctrain.data.order import sample_ids
from hpctrain.errors import ConfigError, choices
from hpctrain.plan.split import intervals, part

__all__ = ["TAILS", "Sampler"]

TAILS = ("straddle", "keep", "drop")


@dataclass(frozen=True)
class Sampler:
    """The updates of one rank, each a list of at most `accumulation` arrays of sample ids. All calls are local.

    Immutable: iterating changes nothing, so a data loader may read ahead as far as it likes. What to save after k
    updates is `state(k)`; what to start from is `start=`. A global batch that does not divide is split by `plan.split`:
    a rank may get fewer samples than others, or none (an empty list; it must take part in the step all the same).

    Attributes:
        num_samples: samples of an epoch, at least 1.
        global_batch: samples of one update over all ranks, at least 1.
        rank, size: place on the data axis and its length.
        seed: the order is a function of (seed, epoch, position).
        accumulation: micro-batches into which the rank's samples of an update are split.
        start: the counter to start from; 0, or a `state()` of any earlier Sampler with these samples and seed.
        end: the counter at which to stop (a multiple of num_samples stops after that many epochs); None: never.
        tail: what becomes of the last, partial global batch of an epoch; see the top of this file.
    """

    num_samples: int
    global_batch: int
    _: KW_ONLY
    rank: int
    size: int
    seed: int
    accumulation: int = 1
    start: int = 0
    end: int | None = None
    tail: str = "straddle"

    def __post_init__(self) -> None:
        for name, low in (("num_samples", 1), ("global_batch", 1), ("accumulation", 1), ("start", 0), ("size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {low}")
        if self.tail not in TAILS:
            raise ConfigError(f"tail = {self.tail!r} is not legal; legal are {choices(TAILS)}")
        if self.tail == "drop" and self.global_batch > self.num_samples:
            raise ConfigError(f"tail = 'drop' with global_batch = {self.global_batch} skips all {self.num_samples} "
                              f"samples; legal are tail = 'straddle' or 'keep', or a batch up to {self.num_samples}")

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """The updates in order: for each the micro-batches of this rank, int64 sample ids; empty ones are left out."""
        for start, stop in self._global_batches():
            yield [ids for ids in self._micro_batches(start, stop) if ids.size]

    def micro_batches(self) -> MicroBatches:
        """The same micro-batches in one flat row: the `batch_sampler` of a torch DataLoader.

        Group the loader's batches with `windows(loader, accumulation)` again. For that, every update must give every
        rank exactly `accumulation` micro-batches.

        Raises:
            ConfigError: some global batch (a kept tail) is too small for that.
        """
        smallest = min(self._batch_sizes())
        if smallest < self.size * self.accumulation:
            raise ConfigError(f"a global batch of {smallest} samples does not give each of {self.size} ranks "
                              f"{self.accumulation} micro-batches; take tail = 'straddle' or 'drop', or iterate over "
                              "the Sampler itself")
        return MicroBatches(self)

    def state(self, num_updates: int) -> int:
        """The global sample counter after `num_updates` updates from `start`: the one integer to save."""
        counter = self.start
        if self.tail != "straddle" and num_updates:
            rest = self.num_samples - counter % self.num_samples  # what is left of the first epoch
            first, per_epoch = self._updates_of(rest), self._updates_of(self.num_samples)
            if num_updates >= first:
                num_epochs, num_updates = divmod(num_updates - first, per_epoch)
                counter += rest + num_epochs * self.num_samples
        counter += num_updates * self.global_batch
        return counter if self.end is None else min(counter, self.end)

    @property
    def updates_per_epoch(self) -> float:
        """Updates of one epoch; a whole number unless tails straddle."""
        return self.num_samples / self.global_batch if self.tail == "straddle" else self._updates_of(self.num_samples)

    def _updates_of(self, num_samples: int) -> int:
        return num_samples // self.global_batch if self.tail == "drop" else -(-num_samples // self.global_batch)

    def _global_batches(self) -> Iterator[tuple[int, int]]:
        counter = self.start
        while self.end is None or counter < self.end:
            stop = counter + self.global_batch
            epoch_end = (counter // self.num_samples + 1) * self.num_samples
            if self.tail == "drop" and stop > epoch_end:
                counter = epoch_end
                continue
            if self.tail == "keep":
                stop = min(stop, epoch_end)
            if self.end is not None:
                stop = min(stop, self.end)
            yield counter, stop
            counter = stop

    def _micro_batches(self, start: int, stop: int) -> list[np.ndarray]:
        low, high = part(stop - start, self.size, self.rank)
        ids = sample_ids(start + low, start + high, self.num_samples, self.seed)
        return [ids[first:last] for first, last in intervals(ids.size, self.accumulation)]

    def _batch_sizes(self) -> set[int]:
        """The sizes of global batch that occur: whole ones and, when tails are kept or the end cuts, smaller ones."""
        sizes = {self.global_batch}
        if self.tail == "keep":
            for rest in (self.num_samples, self.num_samples - self.start % self.num_samples):
                sizes |= {rest % self.global_batch} - {0}
        if self.end is not None and self.tail != "drop":
            begin = self.start if self.tail == "straddle" else max(self.start, self.end - self.end % self.num_samples)
            sizes |= {(self.end - begin) % self.global_batch} - {0}
        return sizes


class MicroBatches:
    """A flat row of lists of sample ids, one a micro-batch; may be iterated many times."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        """The micro-batches in order."""
        for update in self._sampler:
            yield from (ids.tolist() for ids in update)
