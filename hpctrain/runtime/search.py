"""Looks for the first value that is not finite, in micro-batches that are run again one by one.

Owns what is looked at and how it is told; who runs the micro-batches is given elsewhere. Local.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from hpctrain.contracts import Array, Arrays, Model
from hpctrain.runtime.flat_model import FlatModel

__all__ = ["Look", "buffers_kept", "in_memory"]


class Look:
    """What one micro-batch shows on this rank; fulfils `pipeline.run.Collector`.

    Attributes:
        found: the first parameter whose gradient is not finite; "" if there is none.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.found = ""

    def begin(self, *, completes: bool) -> None:
        """Nothing is reduced."""

    def deliver(self, name: str, gradient: Array) -> None:
        """Looks at a gradient."""
        arrays = self._arrays
        flat = arrays.flat if arrays.is_contiguous(gradient) else arrays.to_flat
        if not self.found and not isfinite(arrays.sum_of_squares(flat(gradient))):
            self.found = name

    def end(self) -> None:
        """Nothing is kept."""

    def told(self, micro_batch: int, loss_sum: float) -> str:
        """The first thing that is not finite, the loss before gradients; "" if all is."""
        if not isfinite(loss_sum):
            return f"micro-batch {micro_batch}: the loss is {loss_sum}"
        return f"micro-batch {micro_batch}: the gradient of {self.found!r}" if self.found else ""


def in_memory(flat: FlatModel) -> str:
    """The first parameter whose gradient in memory, a sum over micro-batches, is not finite; "" if all are."""
    arrays = flat.model.arrays
    for region, held in zip(flat.trained, flat.gradients.held, strict=True):
        for slot in region.layout.slots:
            if not isfinite(arrays.sum_of_squares(held.piece(slot.start, slot.stop))):
                return f"the gradient of {slot.name!r}"
    return ""


@contextmanager
def buffers_kept(model: Model) -> Iterator[None]:
    """Buffers are afterwards what they were before."""
    arrays = model.arrays
    before = {name: arrays.to_flat(buffer) for name, buffer in model.buffers().items()}
    yield
    for name, buffer in model.buffers().items():
        arrays.assign(buffer, before[name])
