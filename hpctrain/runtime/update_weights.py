"""The weight of each update of a pipeline that updates several times: counted by the last stage, told to all others.

    last rank     F4 F5 (the last of update 2) | sum over the data axis | send (2, weight) to the other ranks
    others        ... B4 B5 R | receive until the weight of update 2 is there | U

Nobody waits for ever. Take the order in which `proof.prove` plays all ranks, and of all pipelines together the first
action in it that some rank has not done. Its rank has done all that is earlier in its own order, so it stands at this
one:
- A message that it receives was sent earlier: it is there, or on its way, since sends do not wait.
- What it does over its data axis (R, the gathering after U, the sum here) the others of that axis do at the same point
  of the same order, whose earlier actions they have done, too: they are there, or will come after nothing but this.
- A weight was sent before: an update follows a backward of each of its micro-batches on the receiver's stages, each
  comes after the last stage's backward, and that after its forward, of which the last one sends the weight.
So the action is done after all, and the first one that is not done does not exist.

Owns these numbers and messages. Must not know what an update does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays, Work

__all__ = ["UpdateWeights"]


class UpdateWeights:
    """The weights of one step's updates, counted from 1: `begin`, then `count` or `of`, then `finish`.

    Args:
        pipeline: a group of its own of the ranks of a pipeline.
        data: the ranks that hold the same stages.
        last: the rank of the pipeline with the last stage.
        arrays: of the numbers.
    """

    def __init__(self, pipeline: Group, data: Group, last: int, arrays: Arrays) -> None:
        self._pipeline, self._data, self._last, self._arrays = pipeline, data, last, arrays
        self._counts = pipeline.rank == last
        self._number = 0
        self._known: dict[int, float] = {}
        self._missing: list[int] = []
        self._sums: list[float] = []
        self._sent: list[Work] = []
        self._awaited: tuple[Array, Work] | None = None

    def begin(self, sizes: Sequence[int]) -> None:
        """A step begins with updates of so many micro-batches. Local."""
        self._number = len(sizes)
        self._known = {}
        self._missing, self._sums = list(sizes), [0.0] * len(sizes)
        self._await()

    def _await(self) -> None:
        """Posts the receive of the next message."""
        if not self._counts and len(self._known) < self._number:
            message = self._arrays.zeros(2, "float64")
            self._awaited = message, self._pipeline.start_recv(message, self._last)

    def count(self, update: int, weight: float) -> None:
        """One micro-batch of an update, on the rank with the last stage. Collective over the data axis at times."""
        at = update - 1
        self._sums[at] += weight
        self._missing[at] -= 1
        if self._missing[at]:
            return
        total = self._arrays.zeros(1, "float64")
        self._arrays.fill(total, self._sums[at])
        self._data.all_reduce(total, name=f"weight of update {update}")
        self._known[update] = float(total[0])
        for rank in range(self._pipeline.size):
            if rank != self._last:
                message = self._arrays.zeros(2, "float64")
                self._arrays.fill(message[:1], float(update))
                self._arrays.fill(message[1:], self._known[update])
                self._sent.append(self._pipeline.start_send(message, rank))

    def of(self, update: int) -> float:
        """The weight of an update over all pipelines. Blocks until it is told."""
        while update not in self._known:
            assert self._awaited is not None, "the last stage counts before it updates"
            message, work = self._awaited
            work.wait()
            self._known[int(message[0])] = float(message[1])
            self._await()
        return self._known[update]

    def finish(self) -> list[float]:
        """The weights of all updates, on every rank. Blocks until they are told."""
        weights = [self.of(update) for update in range(1, self._number + 1)]
        for work in self._sent:
            work.wait()
        self._sent = []
        return weights
