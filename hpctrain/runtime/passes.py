"""Runs a model over this rank's micro-batches, in step with the other ranks.

    rank 0      F0 B0 F1 B1 F2 B2*
    rank 1      ..... ..... F0 B0*         where all ranks must take part in each pass, one with less data starts later

Owns how many passes there are and what a rank without data does in them: nothing, take part in reductions, or play the
gathering of units. Must not know optimizers or decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpctrain.pipeline.executor import execute
from hpctrain.plan.schedule import Backward, Forward, OptimizerStep, ReduceGrads, accumulate
from hpctrain.runtime.decision import Decider
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.runtime.search import Look, buffers_kept

__all__ = ["Passes"]


class Passes:
    """The passes of one trainer. All methods are collective over the data axis; `part(name)` hears what was done."""

    def __init__(self, flat: FlatModel, decider: Decider, part: Callable[[str], None]) -> None:
        self._flat, self._decider, self._part = flat, decider, part
        self.unused: frozenset[str] = frozenset()

    def train(self, batches: Sequence[Any], loss_scale: float) -> tuple[float, float]:
        """Forward and backward of all micro-batches; gradients are reduced. Gives (loss_sum, weight) of this rank."""
        model, gradients, units = self._flat.model, self._flat.gradients, self._flat.units
        stashes: dict[int, Any] = {}
        terms = [0.0, 0.0]

        def forward(action: Forward) -> None:
            if units is not None:
                units.begin(_kind(action.micro_batch == len(batches) - 1))
            (loss_sum, weight), stashes[action.micro_batch] = model.forward(batches[action.micro_batch])
            terms[0] += loss_sum
            terms[1] += weight
            self._part("forward")

        def backward(action: Backward) -> None:
            gradients.begin(completes=action.completes)
            model.backward(stashes.pop(action.micro_batch), None, gradients.deliver, loss_scale)
            gradients.end()
            if units is not None:
                units.end()
            self._part("backward")

        def reduce_gradients(action: ReduceGrads) -> None:
            self.unused = gradients.finish()

        gradients.start()
        if units is not None or gradients.in_rounds:
            self._take_part(self._decider.largest(len(batches)), len(batches))
        with self._abandoning():
            execute(accumulate(len(batches)), {Forward: forward, Backward: backward, ReduceGrads: reduce_gradients,
                                               OptimizerStep: lambda action: None})
        return terms[0], terms[1]

    def _take_part(self, num_passes: int, num_own: int) -> None:
        """The passes that this rank has no data for come first."""
        gradients, units = self._flat.gradients, self._flat.units
        for i in range(num_passes - num_own):
            completes = i == num_passes - 1
            if units is not None:
                gradients.begin(completes=completes)
                units.play(_kind(completes), gradients.start_next)
                gradients.end()
            elif gradients.in_rounds:
                gradients.begin(completes=completes)
                gradients.end()

    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """Forward only: (loss_sum, weight) of this rank."""
        loss, total = 0.0, 0.0
        for loss_sum, weight in self._each("evaluation", batches, self._evaluated):
            loss += loss_sum
            total += weight
        return loss, total

    def _evaluated(self, batch: Any) -> tuple[float, float]:
        (loss_sum, weight), _ = self._flat.model.forward(batch, training=False)
        return float(loss_sum), float(weight)

    def search(self, batches: Sequence[Any], loss_scale: float) -> str:
        """Runs the micro-batches again and tells where the first value that is not finite comes up on this rank.

        Buffers and random state are what they were before the search.
        """
        model = self._flat.model
        found: list[str] = []

        def one(batch: Any) -> None:
            look = Look(model.arrays)
            (loss_sum, _), stash = model.forward(batch)
            model.backward(stash, None, look.deliver, loss_scale)
            found.append(look.told(len(found), loss_sum))

        with buffers_kept(model):
            self._each("search", batches, one)
        return next(filter(None, found), "")

    def _each(self, kind: str, batches: Iterable[Any], function: Callable[[Any], Any]) -> list[Any]:
        units = self._flat.units
        if units is None:
            return [function(batch) for batch in batches]
        batches = list(batches)
        for _ in range(self._decider.largest(len(batches)) - len(batches)):
            units.play(kind, _no_reductions)
        results = []
        with self._abandoning():
            for batch in batches:
                units.begin(kind)
                results.append(function(batch))
                units.end()
        return results

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """After an error that all ranks raise alike, the next pass can begin."""
        try:
            yield
        except BaseException:
            if self._flat.units is not None:
                self._flat.units.abandon()
            raise


def _kind(completes: bool) -> str:
    return "last micro-batch" if completes else "micro-batch"


def _no_reductions() -> None:
    raise AssertionError("nothing is reduced in this pass")
