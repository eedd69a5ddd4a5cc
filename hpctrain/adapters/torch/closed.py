"""Parameters whose values are not here at the moment: what may be asked of them, and what is an error.

Owns the class that such a parameter has for as long. It keeps shape, type, names, gradient and identity; whatever needs
its values goes to the `Closed` record, which refuses with the parameter's name and the way out, or fetches them. Must
not know why they are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from hpctrain.errors import UnsupportedError

__all__ = ["Closed", "ClosedParameter", "close_parameter", "closed_of", "open_parameter", "shell_of", "tensors_in"]

_RECORD = "_hpctrain_closed"

Heard = Callable[[Any], None]  # is told the result of a call


class Closed:
    """Why a parameter is closed. `home` is the class to give back to it."""

    def __init__(self, name: str, why: str, home: type) -> None:
        self.name, self.why, self.home = name, why, home

    def fetch(self, closed: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> Heard | None:
        """A call wants to use `tensors`, the closed ones among them. None: that is an error.

        Otherwise the values are here when this returns; what is returned is told the call's result.
        """
        return None

    def copied(self, parameter: torch.nn.Parameter, copy: torch.nn.Parameter) -> Closed:
        """The record of a deep copy."""
        return Closed(self.name, "it is a deep copy of a parameter whose values were not here; copy within "
                      "hpctrain.torch.gathered(...)", self.home)


class ClosedParameter(torch.nn.Parameter):
    """A parameter without its values. Never made: a parameter becomes one by `close_parameter`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        """Lets through what needs no values."""
        heard = None if func in _HARMLESS else _fetched(func, tuple(tensors_in((args, kwargs))))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if heard is not None:
            heard(result)
        return result

    def __repr__(self) -> str:
        """Shape and type, and where the values are."""
        record = closed_of(self)
        assert record is not None
        return f"Parameter {record.name!r} of shape {tuple(self.shape)}, {self.dtype}: {record.why}"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A parameter of the same shape and type that is closed as well."""
        if id(self) not in memo:
            record = closed_of(self)
            assert record is not None
            copy = torch.nn.Parameter(shell_of(self), self.requires_grad)
            close_parameter(copy, record.copied(self, copy))
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Values that are not here cannot be written."""
        _fetched("pickle", (self,))
        return super().__reduce_ex__(protocol)


def _fetched(func: Any, tensors: tuple[torch.Tensor, ...]) -> Heard | None:
    """Makes the values of the closed parameters among `tensors` be here, or refuses."""
    closed = [t for t in tensors if isinstance(t, torch.nn.Parameter) and closed_of(t) is not None]
    if not closed:
        return None
    record = closed_of(closed[0])
    assert record is not None
    heard = record.fetch(closed, tensors)
    if heard is None:
        what = func if isinstance(func, str) else getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):
            what = f"the attribute {func.__self__.__name__!r}"
        shape = tuple(closed[0].shape)
        raise UnsupportedError(f"parameter {record.name!r} of shape {shape} was touched by {what} while its values are "
                               f"not here: {record.why}")
    return heard


def closed_of(parameter: torch.nn.Parameter) -> Closed | None:
    """The record of a closed parameter, None if it is not closed."""
    return parameter.__dict__.get(_RECORD)


def shell_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A tensor of the parameter's shape and type, of which there is one element in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def close_parameter(parameter: torch.nn.Parameter, record: Closed) -> None:
    """From now on, until `open_parameter`, the parameter is without values."""
    parameter.__dict__[_RECORD] = record
    parameter.__class__ = ClosedParameter


def open_parameter(parameter: torch.nn.Parameter) -> None:
    """The parameter is what it was, if it is closed."""
    record = parameter.__dict__.pop(_RECORD, None)
    if record is not None:
        parameter.__class__ = record.home


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of any nest of tuples, lists, mappings and data classes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def _harmless() -> frozenset[Any]:
    """What only asks for shape, type, gradient or identity."""
    tensor = torch.Tensor
    asked = ("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "is_sparse",
             "is_quantized", "is_meta", "is_cuda", "is_cpu", "_version", "_backward_hooks", "retains_grad", "itemsize",
             "nbytes", "names", "is_nested", "is_mps", "is_xpu", "is_mkldnn", "output_nr", "name")
    getters = [getattr(tensor, name).__get__ for name in asked if hasattr(tensor, name)]
    getters += [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__,
                tensor._backward_hooks.__set__]
    called = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous", "__len__",
              "is_floating_point", "is_complex", "is_signed", "requires_grad_", "register_hook", "__hash__",
              "register_post_accumulate_grad_hook", "get_device", "storage_offset", "is_conj", "is_neg",
              "is_inference", "has_names", "is_shared")
    methods = [getattr(tensor, name) for name in called if hasattr(tensor, name)]
    return frozenset([*getters, *methods, torch.numel, torch.is_floating_point, torch.is_complex])


_HARMLESS = _harmless()
