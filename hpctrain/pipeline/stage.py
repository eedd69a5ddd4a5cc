"""What the executor runs of a stage: the passes of `contracts.Model`, which a Model has; or somebody in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hpctrain.contracts import Array, Replicated

__all__ = ["Stage"]


class Stage(Protocol):
    """The four passes and what is asked beside them, as `contracts.Model` says."""

    splits: bool

    @property
    def replicated(self) -> Replicated:
        """See Model."""

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """See Model."""

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Array], None],
                 scale: float = 1.0) -> Any:
        """See Model."""

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        """See Model."""

    def backward_weight(self, rest: Any, deliver: Callable[[str, Array], None]) -> None:
        """See Model."""
