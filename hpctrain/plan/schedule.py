"""What one rank does in one training step, as a list of actions.

    accumulation of three micro-batches       F0 B0 F1 B1 F2 B2* R U
                                                              |  | `- update the parameters
    * completes the gradient: its buckets may start reducing -'  `- wait for the reductions

    in a pipeline, `2F5` is the forward of micro-batch 5 through stage 2; I and W are a backward in two parts

A schedule is data: it can be printed, read, checked and run, and the executor is a loop over it. Owns the actions and
their text; which rank runs which of them when is made in `plan.pipeline`. Pure, standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpctrain.errors import PlanError

__all__ = [
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Forward",
    "Message",
    "OptimizerStep",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "SendActivation",
    "SendGrad",
    "accumulate",
    "from_symbol",
    "symbol",
    "to_text",
]


@dataclass(frozen=True)
class Forward:
    """Runs a stage on a micro-batch and keeps its stash."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class Backward:
    """Adds the gradient of a micro-batch and drops its stash. `completes`: no later one adds to these gradients."""

    micro_batch: int
    completes: bool = False
    stage: int = 0


@dataclass(frozen=True)
class BackwardInput:
    """The first part of a backward: the gradient of the stage's input. Keeps what the second part needs."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class BackwardWeight:
    """The second part of a backward: adds the gradient of the parameters. `completes` as in Backward."""

    micro_batch: int
    completes: bool = False
    stage: int = 0


@dataclass(frozen=True)
class SendActivation:
    """Sends what `stage` made of a micro-batch to the stage after it."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class RecvActivation:
    """Receives the input of `stage` from the stage before it."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class SendGrad:
    """Sends the gradient of the input of `stage` to the stage before it."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class RecvGrad:
    """Receives the gradient of the output of `stage` from the stage after it."""

    micro_batch: int
    stage: int = 0


@dataclass(frozen=True)
class ReduceGrads:
    """Starts what reduction has not started yet and waits for all. Of all stages of the rank."""


@dataclass(frozen=True)
class OptimizerStep:
    """Updates the parameters of all stages of the rank."""


Compute = Forward | Backward | BackwardInput | BackwardWeight
Message = SendActivation | RecvActivation | SendGrad | RecvGrad
Action = Compute | Message | ReduceGrads | OptimizerStep

_LETTERS: dict[type, str] = {
    Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W",
    SendActivation: "SA", RecvActivation: "RA", SendGrad: "SG", RecvGrad: "RG",
}  # fmt: skip
_TYPES = {letters: kind for kind, letters in _LETTERS.items()}
_SYMBOL = re.compile(r"(\d+)?(F|B|I|W|SA|RA|SG|RG)(\d+)(\*?)")


def accumulate(num_micro_batches: int) -> Iterator[Action]:
    """One stage, any number of micro-batches (0 too: a rank without data still takes part in the reduction)."""
    for i in range(num_micro_batches):
        yield Forward(i)
        yield Backward(i, completes=i == num_micro_batches - 1)
    yield ReduceGrads()
    yield OptimizerStep()


def to_text(actions: Iterable[Action], *, stages: bool = False) -> str:
    """The picture of a schedule, `F0 B0* R U`; a star marks the backward that completes the gradient.

    With `stages` every action says its stage: `1F0 1B0* R U`.
    """
    return " ".join(symbol(action, stages=stages) for action in actions)


def symbol(action: Action, *, stages: bool = False) -> str:
    """One action as text; with `stages`, its stage in front."""
    if isinstance(action, ReduceGrads):
        return "R"
    if isinstance(action, OptimizerStep):
        return "U"
    star = "*" if isinstance(action, Backward | BackwardWeight) and action.completes else ""
    return f"{action.stage if stages else ''}{_LETTERS[type(action)]}{action.micro_batch}{star}"


def from_symbol(text: str, stage: int | None = 0) -> Action:
    """The action that `symbol` shows as `text`; `stage` is meant where the text names none.

    Raises:
        PlanError: not an action, or no stage in the text and `stage` is None.
    """
    if text in ("R", "U"):
        return ReduceGrads() if text == "R" else OptimizerStep()
    found = _SYMBOL.fullmatch(text)
    if found is None or (found[4] and found[2] not in ("B", "W")):
        raise PlanError(f"{text!r} is not an action; actions look like F0, 2F0, B0, B0*, I0, W0, W0*, R, U")
    if found[1] is None and stage is None:
        raise PlanError(f"{text!r} says no stage, and its rank does not hold exactly one; write 0{text}, 1{text}, ...")
    of = stage if found[1] is None else int(found[1])
    assert of is not None
    kind = _TYPES[found[2]]
    if kind in (Backward, BackwardWeight):
        return kind(int(found[3]), bool(found[4]), of)
    return kind(int(found[3]), of)
