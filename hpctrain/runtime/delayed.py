"""Updates that come one step late: the one from a step's gradients runs in a thread while the next step computes.

    step            i                    i + 1                     i + 2
    this thread     F B reduce | keep    F B reduce | publish,keep F B reduce | ...
    its thread                           update (g_i)              update (g_i+1)

So step i + 1 computes with parameters that have not seen g_i: parameters(i + 2) = update(parameters(i + 1), g_i) with
g_i taken at parameters(i) (ZeRO-Offload, arXiv 2101.06840, section 5.2, one-step delayed parameter update).

Owns the gradients that wait, and the thread. Must not know how gradients came about, nor what a step decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.contracts import Array
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.runtime.flat_model import FlatModel
from hpctrain.zero.held import Held
from hpctrain.zero.lender import Plain

__all__ = ["Delayed"]


@dataclass(frozen=True)
class _Waiting:
    """`optimizer.apply(update, factor, ...)` is to be done with the gradients that are kept."""

    update: int
    factor: float


class Delayed:
    """The updates of one trainer that come late, if it wants any. All calls are local but `publish`."""

    def __init__(self, flat: FlatModel, optimizer: FlatOptimizer) -> None:
        self._flat, self._optimizer, self._arrays = flat, optimizer, flat.model.arrays
        self._options = flat.zero.offload
        self._thread = ThreadPoolExecutor(1, "delayed-update")
        self._running: Future[None] | None = None
        self._waiting: _Waiting | None = None
        self.held = flat.own_copies(flat.lender) if self._options.delay else []

    def begins(self, update: int) -> bool:
        """Whether the update after `update` ones comes late."""
        return self._options.delay and update >= self._options.delay_start

    def keep(self, update: int, factor: float, gradients: Sequence[Sequence[Array]]) -> None:
        """Keeps `gradients` (of what this rank updates) for an update in the next step."""
        assert self._waiting is None, "publish comes first"
        for targets, sources in zip(self._views(), gradients, strict=True):
            for target, source in zip(targets, sources, strict=True):
                self._arrays.assign(target, source)
                self._flat.lender.release(source)
                self._flat.lender.release(target)
        self._waiting = _Waiting(update, factor)

    def start(self) -> None:
        """Starts the update that waits, if one does. Until `publish` no parameter changes, but masters do."""
        if self._waiting is not None and self._running is None:
            waiting = self._waiting
            self._running = self._thread.submit(self._optimizer.apply, waiting.update, waiting.factor, self._views())

    def publish(self) -> None:
        """Waits for the update that was started, if one was, and shows it to all ranks. Collective over the group."""
        if self._running is not None:
            self._running.result()
            self._running = self._waiting = None
            self._flat.publish()

    def _views(self) -> list[list[Array]]:
        return self._flat.views(self.held)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any] | None:
        """What is said in a checkpoint of the gradients that wait (`held`); None: none do."""
        return None if self._waiting is None else asdict(self._waiting)

    def prepare(self, saved: dict[str, Any] | None) -> Sequence[Held]:
        """Forgets what waits; gives the memory that a checkpoint's waiting gradients are read into, if it has some."""
        self._waiting = None
        if saved is not None and not self._options.delay:
            self.held = self._flat.own_copies(Plain(self._arrays))
        return self.held if saved is not None else []

    def restore(self, saved: dict[str, Any] | None) -> None:
        """They have been read: they wait again, or are applied if none comes late. Collective over the group."""
        if saved is None:
            return
        self._waiting = _Waiting(**saved)
        if not self._options.delay:
            self.start()
            self.publish()
            self.held = []
