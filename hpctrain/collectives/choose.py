"""Which algorithm carries out a collective: a table of rows, read from the top, the first that fits decides.

Owns rows and the choice among them. The shipped rows are in `choice_defaults`, a site's own come from a file
(`choice_file`). The choice is a pure function of the call's arguments, which all ranks share, so all ranks choose alike
without asking each other. Must not know how an algorithm works, nor measure anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hpctrain.collectives import choice_file
from hpctrain.collectives.choice_defaults import SHIPPED
from hpctrain.collectives.choice_row import WAYS, Row, check_rows, ways
from hpctrain.dtypes import dtype_of
from hpctrain.errors import UnsupportedError, choices
from hpctrain.plan.algorithms import ALGORITHMS

__all__ = ["Choice", "Chooser", "ways"]

_SHIPPED_SOURCE = "the shipped table"


@dataclass(frozen=True)
class Choice:
    """An algorithm for one operation, and why it was taken, in words."""

    operation: str
    algorithm: str
    reason: str


class Chooser:
    """Chooses by a site's rows first, then by the shipped ones, so that every legal call has an algorithm.

    Args:
        rows: the site's rows; none for the shipped table alone.
        source: where they come from, for reasons and messages.

    Raises:
        ConfigError: a row is illegal, or can never be reached. The message names it.
    """

    def __init__(self, rows: Sequence[Row] = (), *, source: str = "the site's table") -> None:
        check_rows(rows, source)
        named = [(row, f"{source}, row {number}") for number, row in enumerate(rows, start=1)]
        named += [(row, _SHIPPED_SOURCE) for row in SHIPPED]
        self._rows = {operation: [pair for pair in named if pair[0].operation == operation] for operation in ALGORITHMS}
        self._chosen = lru_cache(maxsize=1024)(self._look_up)

    @classmethod
    def load(cls, path: str | Path) -> Chooser:
        """A chooser with the rows of a TOML file. Local; in a job, let one rank read and give `parse` the text.

        Raises:
            ConfigError: no such file, not TOML, or an illegal row.
        """
        return cls.parse(choice_file.read_text(path), source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "the site's table") -> Chooser:
        """As `load`, from the text of such a file, called `source` in messages. Pure."""
        return cls(choice_file.parse_rows(text, source), source=source)

    def choose(self, operation: str, num_bytes: int, num_ranks: int, num_nodes: int, dtype: str,
               ways: frozenset[str] = frozenset()) -> Choice:
        """The choice for one call; the same on all ranks that give the same arguments. Pure.

        Args:
            operation: a key of `hpctrain.plan.algorithms.ALGORITHMS`.
            num_bytes: of the whole array: what each rank reduces or broadcasts, what the root scatters or gathers, what
                an all-gather ends with, what a reduce-scatter or an all-to-all starts from on one rank.
            num_ranks: ranks of the group.
            num_nodes: nodes that they are on.
            dtype: a name of `hpctrain.dtypes`.
            ways: what may be chosen besides plans: "native", "shared memory".

        Raises:
            UnsupportedError: an unknown operation or dtype.
        """
        return self._chosen(operation, num_bytes, num_ranks, num_nodes, dtype, ways)

    def _look_up(self, operation: str, num_bytes: int, num_ranks: int, num_nodes: int, dtype: str,
                 ways: frozenset[str]) -> Choice:
        assert num_bytes >= 0 and 1 <= num_nodes <= num_ranks, (num_bytes, num_ranks, num_nodes)
        dtype_of(dtype)
        if operation not in self._rows:
            raise UnsupportedError(f"operation {operation!r} is not a collective; legal are {choices(ALGORITHMS)}")
        row, source = next(pair for pair in self._rows[operation]
                           if pair[0].fits(num_bytes, num_ranks, num_nodes, dtype)
                           and (pair[0].algorithm not in WAYS or pair[0].algorithm in ways))  # fmt: skip
        call = f"{num_bytes} bytes of {dtype}, {_counted(num_ranks, 'rank')} on {_counted(num_nodes, 'node')}"
        return Choice(operation, row.algorithm, f"{call}: {row.reason} ({source})")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
