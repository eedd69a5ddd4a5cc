"""What goes from stage to stage: nests of plain values and arrays, taken apart and put together.

    {"x": array (4, 8), "mask": array of bool, "scale": 0.5}
        form    the nest with each array replaced by its type, its shape, whether it needs a gradient and whether all
                ranks of a tensor group have the same; JSON text
        arrays  in the order of the form

The gradient of a nest is the same nest with None for all that needs no gradient. Owns the form; knows no messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.contracts import Array, ArraysOf, Replicated
from hpctrain.errors import UnsupportedError

__all__ = ["Form", "Leaf", "describe"]


@dataclass(frozen=True)
class Leaf:
    """One array of a nest. `gradient`: whether one comes back. `replicated`: see `contracts.Model.replicated`."""

    dtype: str
    shape: tuple[int, ...]
    gradient: bool
    replicated: bool = False


class Form:
    """The structure of a nest. Equal texts are equal forms.

    Attributes:
        leaves: its arrays.
        needing: those that need a gradient.
        layout: what is to be known of a message of its arrays: their types and shapes, and which are replicated.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = json.loads(text)
        self.leaves = tuple(_leaves(self._tree))
        self.needing = tuple(leaf for leaf in self.leaves if leaf.gradient)
        self.layout = [(leaf.dtype, leaf.shape, leaf.replicated) for leaf in self.leaves]

    def build(self, arrays: Sequence[Array]) -> Any:
        """The nest with these arrays."""
        rest = iter(arrays)
        return _build(self._tree, lambda gradient: next(rest), plain=True)

    def gradient_nest(self, arrays: Sequence[Array]) -> Any:
        """The nest of these gradients, which are those of the leaves that need one."""
        rest = iter(arrays)
        return _build(self._tree, lambda gradient: next(rest) if gradient else None, plain=False)

    def gradients(self, nest: Any) -> list[Array | None]:
        """The gradients of the leaves that need one, out of their nest; None where the nest has none."""
        return list(_gradients(self._tree, nest))


def describe(nest: Any, arrays_of: ArraysOf, needs: Callable[[str], bool],
             replicated: Replicated = False) -> tuple[str, list[Array]]:
    """(text of the form, arrays) of `nest`; `needs(dtype)` says which arrays need a gradient. Local.

    `replicated` says which are so, as `contracts.Model.replicated` does.

    Raises:
        UnsupportedError: something in the nest is of another type; says where and which are legal.
    """
    arrays: list[Array] = []
    tree = _describe(nest, "", arrays, arrays_of, needs, replicated)
    return json.dumps(tree, separators=(",", ":")), arrays


def _describe(nest: Any, where: str, arrays: list[Array], arrays_of: ArraysOf, needs: Callable[[str], bool],
              replicated: Replicated) -> Any:
    if nest is None or type(nest) in (bool, int, float, str):
        return nest
    if type(nest) in (list, tuple):
        parts = [_describe(part, f"{where}[{i}]", arrays, arrays_of, needs, _of_part(replicated, i))
                 for i, part in enumerate(nest)]
        return {"list" if type(nest) is list else "tuple": parts}
    if type(nest) is dict:
        for key in nest:
            if key is not None and type(key) not in (bool, int, float, str):
                raise UnsupportedError(f"a stage's outputs{where} have the key {key!r}; legal are plain values")
        return {"dict": [[key, _describe(part, f"{where}[{key!r}]", arrays, arrays_of, needs,
                                         _of_part(replicated, key))] for key, part in nest.items()]}
    try:
        backend = arrays_of(nest)
    except UnsupportedError as error:
        raise UnsupportedError(f"a stage's outputs{where} cannot be sent: {error}, or dict, list, tuple, None, bool, "
                               "int, float, str") from None
    arrays.append(nest)
    dtype = backend.dtype(nest)
    return {"array": [dtype, list(backend.shape(nest)), needs(dtype), replicated is True]}


def _of_part(replicated: Replicated, key: Any) -> Replicated:
    return replicated if isinstance(replicated, bool) else replicated.get(key, False)


def _leaves(tree: Any) -> Iterator[Leaf]:
    if not isinstance(tree, dict):
        return
    ((kind, content),) = tree.items()
    if kind == "array":
        yield Leaf(content[0], tuple(content[1]), content[2], content[3])
        return
    for part in content:
        yield from _leaves(part[1] if kind == "dict" else part)


def _build(tree: Any, take: Callable[[bool], Any], *, plain: bool) -> Any:
    """`take` is told whether the array needs a gradient. `plain`: other values are kept, else they become None."""
    if not isinstance(tree, dict):
        return tree if plain else None
    ((kind, content),) = tree.items()
    if kind == "array":
        return take(content[2])
    if kind == "dict":
        return {key: _build(part, take, plain=plain) for key, part in content}
    parts = [_build(part, take, plain=plain) for part in content]
    return parts if kind == "list" else tuple(parts)


def _gradients(tree: Any, nest: Any) -> Iterator[Array | None]:
    if not isinstance(tree, dict):
        return
    ((kind, content),) = tree.items()
    if kind == "array":
        if content[2]:
            yield nest
    elif kind == "dict":
        for key, part in content:
            yield from _gradients(part, None if nest is None else nest[key])
    else:
        assert nest is None or len(nest) == len(content), "a gradient has the structure of what it is the gradient of"
        for i, part in enumerate(content):
            yield from _gradients(part, None if nest is None else nest[i])
