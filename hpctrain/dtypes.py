"""Names, sizes and kinds of the element types, and which reductions are defined on them.

The one table of dtype x operation. It names types by the strings that NumPy, torch and CuPy share, so no array
library is needed to read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import UnsupportedError, choices

__all__ = ["DTYPES", "OPERATIONS", "DType", "check_reduction", "dtype_of"]


@dataclass(frozen=True)
class DType:
    """One element type. `accumulate` names the type that sums and products of it are carried in (one rounding
    at the end).
    """

    name: str
    num_bytes: int
    kind: str  # "float", "int", "bool" or "complex"
    accumulate: str


def _table() -> dict[str, DType]:
    rows = [DType(f"float{8 * n}", n, "float", f"float{8 * n}") for n in (4, 8)]
    rows += [DType(name, 2, "float", "float32") for name in ("float16", "bfloat16")]
    rows += [DType(f"{sign}int{8 * n}", n, "int", f"{sign}int{8 * n}") for sign in ("", "u") for n in (1, 2, 4, 8)]
    rows += [DType("bool", 1, "bool", "bool")]
    rows += [DType(f"complex{8 * n}", n, "complex", f"complex{8 * n}") for n in (8, 16)]
    return {row.name: row for row in rows}


DTYPES: dict[str, DType] = _table()

#: Which kinds of element each reduction is defined on. Sums and products of bool have no agreed meaning (a count? an
#: OR?), means of integers lose their fraction, complex numbers have no order, bits of floating point numbers mean
#: nothing one by one: these are refused by name. Logical operations take any element for true that is not zero, and
#: give 1 or 0 in the same dtype.
OPERATIONS: dict[str, frozenset[str]] = {
    "sum": frozenset({"float", "int", "complex"}),
    "mean": frozenset({"float", "complex"}),
    "min": frozenset({"float", "int", "bool"}),
    "max": frozenset({"float", "int", "bool"}),
    "prod": frozenset({"float", "int", "complex"}),
    "logical_and": frozenset({"float", "int", "bool", "complex"}),
    "logical_or": frozenset({"float", "int", "bool", "complex"}),
    "logical_xor": frozenset({"float", "int", "bool", "complex"}),
    "band": frozenset({"int", "bool"}),
    "bor": frozenset({"int", "bool"}),
    "bxor": frozenset({"int", "bool"}),
}


def dtype_of(name: str) -> DType:
    """The row of `name`. Raises UnsupportedError that lists the known names."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(f"dtype {name!r} is not supported; legal are {choices(DTYPES)}") from None


def check_reduction(operation: str, dtype: str) -> None:
    """Refuses, before anything moves, a reduction that is not defined on `dtype`."""
    if operation not in OPERATIONS:
        raise UnsupportedError(f"operation {operation!r} is not a reduction; legal are {choices(OPERATIONS)}")
    kinds = OPERATIONS[operation]
    if dtype_of(dtype).kind not in kinds:
        legal = choices(d.name for d in DTYPES.values() if d.kind in kinds)
        raise UnsupportedError(f"operation {operation!r} is not defined on dtype {dtype!r}; legal are {legal}")
