"""What one rank does in one training step, as a list of actions.

    accumulation of three micro-batches       F0 B0 F1 B1 F2 B2* R U
                                                              |  | `- update the parameters
    * completes the gradient: its buckets may start reducing -'  `- wait for the reductions

A schedule is data: it can be printed, checked and run, and the executor is a loop over it. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Action", "Backward", "Forward", "OptimizerStep", "ReduceGrads", "accumulate", "to_text"]


@dataclass(frozen=True)
class Forward:
    """Runs the model on a micro-batch and keeps its stash."""

    micro_batch: int


@dataclass(frozen=True)
class Backward:
    """Adds the gradient of a micro-batch and drops its stash. `completes`: no later one adds to these gradients."""

    micro_batch: int
    completes: bool = False


@dataclass(frozen=True)
class ReduceGrads:
    """Starts what reduction has not started yet and waits for all."""


@dataclass(frozen=True)
class OptimizerStep:
    """Updates the parameters."""


Action = Forward | Backward | ReduceGrads | OptimizerStep


def accumulate(num_micro_batches: int) -> Iterator[Action]:
    """One stage, any number of micro-batches (0 too: a rank without data still takes part in the reduction)."""
    for i in range(num_micro_batches):
        yield Forward(i)
        yield Backward(i, completes=i == num_micro_batches - 1)
    yield ReduceGrads()
    yield OptimizerStep()


def to_text(actions: Iterable[Action]) -> str:
    """The picture of a schedule, `F0 B0* R U`; a star marks the backward that completes the gradient."""
    return " ".join(_symbol(action) for action in actions)


def _symbol(action: Action) -> str:
    match action:
        case Forward(i):
            return f"F{i}"
        case Backward(i, completes):
            return f"B{i}{'*' if completes else ''}"
        case ReduceGrads():
            return "R"
        case OptimizerStep():
            return "U"
