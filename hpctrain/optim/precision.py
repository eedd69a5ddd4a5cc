"""Which element type is used for what: the options of mixed precision, and their defaults.

Knows names of types and nothing else: who allocates, casts or reduces asks a resolved record.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpctrain.dtypes import DTYPES, dtype_of
from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["Precision", "ResolvedPrecision"]

FLOATS = tuple(name for name, row in DTYPES.items() if row.kind == "float")


@dataclass(frozen=True)
class ResolvedPrecision:
    """The element types of one model parameter and what belongs to it; every name is filled in.

    parameter   the live parameters, as the model and the other ranks see them
    compute     the model's arithmetic
    accumulate  gradients in memory, over micro-batches
    reduce      gradients between ranks
    master      the parameters that the optimizer updates, and its states
    """

    parameter: str
    compute: str
    accumulate: str
    reduce: str
    master: str

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates parameters of its own and the live ones are rounded from them."""
        return self.master != self.parameter

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients may be too small for the type of the arithmetic (below 2^-24 in float16)."""
        return self.compute == "float16"


@dataclass(frozen=True)
class Precision:
    """Mixed precision as a user writes it (arXiv 1710.03740); None means: by the rules of `resolve`.

    `Precision(compute="bfloat16")` is the usual one: half types for the model, float32 for all that is summed up.
    """

    parameter: str | None = None
    compute: str | None = None
    accumulate: str | None = None
    reduce: str | None = None
    master: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value not in FLOATS:
                raise ConfigError(f"precision.{field.name} = {value!r} is not legal; legal are {choices(FLOATS)}"
                                  f"{nearest(str(value), FLOATS)}, or None (chosen)")

    def resolve(self, dtype: str) -> ResolvedPrecision:
        """Fills in the types for parameters that the model has in `dtype`. Local, pure.

        The arithmetic is in `compute`, else in `parameter`, else in the model's type; parameters live in the type of
        the arithmetic. What is summed up (accumulate, reduce, master) is float32 for half types, else as the others.

        Raises:
            ConfigError: a type cannot hold the values of the one that it is filled from, or masters of float16, in
                which the optimizer's states (squares of gradients) and small updates are lost.
        """
        compute = self.compute or self.parameter or dtype
        parameter = self.parameter or compute
        accumulate = self.accumulate or dtype_of(compute).accumulate
        reduce = self.reduce or accumulate
        master = self.master or dtype_of(parameter).accumulate
        resolved = ResolvedPrecision(parameter, compute, accumulate, reduce, master)
        for wide, narrow in (("parameter", "compute"), ("accumulate", "compute"), ("accumulate", "reduce"),
                             ("master", "parameter")):
            given, needed = getattr(resolved, wide), getattr(resolved, narrow)
            if not _holds(given, needed):
                legal = choices(name for name in FLOATS if _holds(name, needed))
                raise ConfigError(f"precision.{wide} = {given!r} cannot hold the values of precision.{narrow} = "
                                  f"{needed!r}; legal are {legal}")
        if resolved.master == "float16":
            raise ConfigError("precision.master = 'float16' is not legal; legal are "
                              f"{choices(name for name in FLOATS if name != 'float16')}")
        return resolved


def _holds(wide: str, narrow: str) -> bool:
    """Whether each value of `narrow` is one of `wide`: neither half type holds the other."""
    return wide == narrow or dtype_of(wide).num_bytes > dtype_of(narrow).num_bytes
