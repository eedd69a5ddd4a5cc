"""Nests of dict, list, tuple, None, bool, int, float, str and tensors: what stages hand to each other.

Owns the walk through a nest. Must not know what is done with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpctrain.errors import UnsupportedError

__all__ = ["map_tensors", "pairs"]

_PLAIN = (bool, int, float, str, type(None))


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any, *, plain: bool = True) -> Any:
    """The nest with `function(tensor)` in the place of each tensor; other values as they are, or None if not `plain`.

    Raises:
        UnsupportedError: something else than the types above is in the nest.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, _PLAIN):
        return nest if plain else None
    if type(nest) is dict:
        return {key: map_tensors(function, value, plain=plain) for key, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(map_tensors(function, value, plain=plain) for value in nest)
    raise UnsupportedError(f"a stage hands on {type(nest).__name__}; legal are nests of dict, list, tuple, None, bool, "
                           "int, float, str and torch tensors")


def pairs(nest: Any, other: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """(tensor, what `other` has in its place) for each tensor of the nest; None where `other` has None."""
    if isinstance(nest, torch.Tensor):
        yield nest, other
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from pairs(value, None if other is None else other[key])
    elif isinstance(nest, (list, tuple)):
        for number, value in enumerate(nest):
            yield from pairs(value, None if other is None else other[number])
