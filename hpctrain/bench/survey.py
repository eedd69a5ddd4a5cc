"""One pass over operations, dtypes and sizes: checks every contender, then times them side by side.

Owns the order of the work and who takes part. Must not know what becomes of the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.bench.contenders import NATIVE, OPERATIONS, Case
from hpctrain.bench.figures import Measured
from hpctrain.bench.measure import alternate, copy_seconds
from hpctrain.collectives import Group
from hpctrain.collectives.choose import ways
from hpctrain.dtypes import DTYPES
from hpctrain.errors import ConfigError, UnsupportedError, choices, nearest
from hpctrain.plan.algorithms import ALGORITHMS

__all__ = ["CHOSEN", "Request", "survey"]

#: The contender that is hpctrain left to itself: memory that the ranks share where it can, else the table's algorithm.
CHOSEN = "chosen"


@dataclass(frozen=True)
class Request:
    """What to measure. `algorithms` are names of algorithms, "chosen", "MPI", or nothing for all there are.

    Raises:
        ConfigError: a word that is not known, naming the legal ones.
    """

    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...] = ()
    rounds: int = 11

    def __post_init__(self) -> None:
        everything = dict.fromkeys([CHOSEN, NATIVE, *(name for operation in ALGORITHMS for name in ways(operation))])
        for option, given, legal in (("operations", self.operations, OPERATIONS), ("dtypes", self.dtypes, DTYPES),
                                     ("algorithms", self.algorithms, everything)):
            for word in given:
                if word not in legal:
                    raise ConfigError(f"--{option}: {word!r} is unknown{nearest(word, legal)}; "
                                      f"legal are {choices(legal)}")

    def algorithms_of(self, operation: str) -> list[str]:
        """hpctrain's contenders for an operation, in the order of the picture's legend."""
        everything = [CHOSEN, *(ways(operation) if operation in ALGORITHMS else ())]  # a message has one way only
        return [name for name in everything if not self.algorithms or name in self.algorithms]


def survey(group: Group, request: Request, communicator: Any = None) -> Iterator[Measured]:
    """Yields each operation, dtype and size as it is done. Collective over the group, which must be used to its end.

    `communicator` is MPI's own, of the same ranks in the same order, or None where there is no MPI. Contenders that
    refuse the operation on a dtype are left out of the times.

    Raises:
        RuntimeError: a contender gave a wrong result.
    """
    for operation in request.operations:
        for dtype in request.dtypes:
            for size in request.sizes:
                yield _measure(group, request, communicator, Case(group, operation, dtype, size), operation)


def _measure(group: Group, request: Request, communicator: Any, case: Case, operation: str) -> Measured:
    calls = {name: case.ours(None if name == CHOSEN else name) for name in request.algorithms_of(operation)}
    wanted = not request.algorithms or NATIVE in request.algorithms
    native = case.native(communicator) if communicator is not None and wanted else None
    if native is not None:
        calls[NATIVE] = native
    refused: dict[str, str] = {}
    for name in list(calls):
        try:
            with group.agree():
                case.check(calls[name])
        except UnsupportedError as error:
            refused[name] = str(error)
            del calls[name]
        except ArithmeticError as error:
            raise RuntimeError(f"{operation} of {case.dtype} by {name}: {error}") from error
    times = alternate(group, calls, request.rounds) if calls else {}
    copy = copy_seconds(group, case.num_bytes, request.rounds)
    return Measured(operation, case.dtype, case.num_bytes, group.size, times, copy, NATIVE if native else None, refused)


def names_of(measured: Sequence[Measured]) -> list[str]:
    """The contenders of several measurements, each once, in the order of their first appearance."""
    return list(dict.fromkeys(name for one in measured for name in one.times))
