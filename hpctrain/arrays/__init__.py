"""Array backends: the Arrays contract, one file a library.

Owns how each library holds flat buffers and does arithmetic on them, and the search for the library of a given array.
Knows nothing of transports, collectives or models. Nothing is imported on the user's behalf: a library is recognised
only when its user has loaded it already.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import cast

from hpctrain.contracts import Array, Arrays
from hpctrain.errors import UnsupportedError

__all__ = ["arrays_of"]

#: library -> (name of its array type, our module, our class)
_BACKENDS = {
    "torch": ("Tensor", "hpctrain.arrays.torch", "TorchArrays"),
    "numpy": ("ndarray", "hpctrain.arrays.numpy", "NumpyArrays"),
}


def arrays_of(array: Array) -> Arrays:
    """The backend of `array`. Local.

    Raises UnsupportedError for anything but a numpy.ndarray or a dense torch.Tensor in host memory.
    """
    backend = _known.get(type(array)) or _backend(type(array))
    if backend is None:
        raise UnsupportedError(
            f"a {type(array).__module__}.{type(array).__qualname__} is not an array; "
            "legal are numpy.ndarray and torch.Tensor"
        )
    _known[type(array)] = backend
    if backend.name == "torch" and not (array.is_cpu and array.layout is sys.modules["torch"].strided):
        raise UnsupportedError(
            f"a torch.Tensor on device {str(array.device)!r} with layout {array.layout} is not supported; "
            "legal is device 'cpu' with layout torch.strided"
        )
    return backend


_known: dict[type, Arrays] = {}  # types that were recognised


def _backend(kind: type) -> Arrays | None:
    for library, (name, module, backend) in _BACKENDS.items():
        loaded = sys.modules.get(library)
        if loaded is not None and issubclass(kind, getattr(loaded, name, ())):
            return _make(module, backend)
    return None


@cache
def _make(module: str, backend: str) -> Arrays:
    return cast("Arrays", getattr(import_module(module), backend)())
