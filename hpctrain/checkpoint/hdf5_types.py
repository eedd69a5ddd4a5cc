"""Which HDF5 type stands for which dtype name, and how large an element is.

Owns the table dtype <-> HDF5 type. Values are only ever moved raw: HDF5 converts bfloat16 about a hundred times slower
than a copy and rounds some values wrongly, so nothing here asks it to. The only place that imports h5py's name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.dtypes import DTYPES
from hpctrain.errors import CheckpointError, UnsupportedError, choices

__all__ = ["fill_value", "h5py_module", "item_bytes", "type_of"]

#: sign bit, exponent position and size, mantissa position and size; bytes; exponent bias; type that it is cut from
_CUSTOM_FLOATS: dict[str, tuple[tuple[int, int, int, int, int], int, int, str]] = {
    "bfloat16": ((15, 7, 8, 0, 7), 2, 127, "IEEE_F32LE"),
    "float8_e4m3fn": ((7, 3, 4, 0, 3), 1, 7, "IEEE_F32LE"),
    "float8_e5m2": ((7, 2, 5, 0, 2), 1, 15, "IEEE_F32LE"),
}
_ITEM_BYTES = {name: dtype.num_bytes for name, dtype in DTYPES.items()} | {
    name: size for name, (_, size, _, _) in _CUSTOM_FLOATS.items()
}


def h5py_module() -> Any:
    """h5py, or a CheckpointError that says what to install."""
    try:
        import h5py  # deferred: `import hpctrain` must work without it
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints need h5py, which cannot be imported ({error}). Install it with `pip install h5py`; "
            "an ordinary build will do, parallel HDF5 is not needed"
        ) from error
    return h5py


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises UnsupportedError that lists the legal names."""
    if dtype not in _ITEM_BYTES:
        raise UnsupportedError(f"dtype {dtype!r} cannot be saved; legal are {choices(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


def type_of(dtype: str) -> Any:
    """The little-endian HDF5 type (an `h5py.h5t.TypeID`) of `dtype`; bool is stored as uint8."""
    h5t = h5py_module().h5t
    item_bytes(dtype)
    if dtype in _CUSTOM_FLOATS:
        fields, size, bias, base = _CUSTOM_FLOATS[dtype]
        custom = getattr(h5t, base).copy()
        custom.set_fields(*fields)  # before the size: the fields must fit at every moment
        custom.set_size(size)
        custom.set_ebias(bias)
        return custom
    return h5t.py_create(np.dtype("uint8" if dtype == "bool" else dtype).newbyteorder("<"))


def fill_value(dtype: str) -> np.ndarray[Any, Any]:
    """What a virtual dataset shows where its source is missing: NaN, the lowest integer, the highest unsigned one.

    Zeros would pass for values.
    """
    if dtype in _CUSTOM_FLOATS:
        return np.array(np.nan, "<f4")
    kind = np.dtype("uint8" if dtype == "bool" else dtype).newbyteorder("<")
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.array(limits.min if kind.kind == "i" else limits.max, kind)
    return np.array(np.nan, kind)
