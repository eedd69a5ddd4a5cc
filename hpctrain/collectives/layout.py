"""Arrays of any layout as flat ones, and back.

Owns the copies that a layout makes necessary. Local; knows no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from hpctrain.contracts import Array, Arrays
from hpctrain.errors import UnsupportedError

__all__ = ["Output", "check_out", "count_of", "elements", "to_receive", "to_write"]


@dataclass(slots=True)
class Output:
    """The flat array that a collective writes, its bytes, and, if needed, how the user's array gets the result."""

    flat: Array
    memory: memoryview
    put_back: Callable[[], None] | None = None


def elements(arrays: Arrays, array: Array) -> Array:
    """The logical content of an array of any layout as a flat one, which may be the array's own memory: to read."""
    return arrays.flat(array) if arrays.is_contiguous(array) else arrays.to_flat(array)


def to_write(arrays: Arrays, array: Array) -> Output:
    """An array of any layout as a flat one with its content, to read and write.

    Raises ValueError for a read-only array.
    """
    if not arrays.is_contiguous(array):
        flat = arrays.to_flat(array)
        return Output(flat, arrays.memory(flat), lambda: arrays.assign(array, flat))
    return Output(arrays.flat(array), _written(arrays, array))


def to_receive(arrays: Arrays, array: Array) -> tuple[memoryview, Callable[[], None] | None]:
    """(memory, how the array gets its content) of an array of any layout whose content does not matter."""
    if not arrays.is_contiguous(array):
        output = to_write(arrays, array)
        return output.memory, output.put_back
    return _written(arrays, array), None


def _written(arrays: Arrays, array: Array) -> memoryview:
    memory = arrays.memory(array)
    if memory.readonly:
        raise ValueError("the array is read-only, but its collective works in place; pass a copy")
    return memory


def count_of(arrays: Arrays, array: Array) -> int:
    """Elements of an array of any shape."""
    return prod(arrays.shape(array))


def check_out(arrays: Arrays, arrays_of_out: Arrays, out: Array, dtype: str, count: int) -> None:
    """Refuses an `out` of another library, dtype or number of elements."""
    if arrays_of_out.name != arrays.name:
        raise UnsupportedError(f"out is an array of {arrays_of_out.name}; legal is {arrays.name}, as the input")
    if arrays.dtype(out) != dtype:
        raise UnsupportedError(f"out has dtype {arrays.dtype(out)!r}; legal is {dtype!r}, as the input")
    if count_of(arrays, out) != count:
        raise ValueError(f"out has {count_of(arrays, out)} elements; must have {count}")
