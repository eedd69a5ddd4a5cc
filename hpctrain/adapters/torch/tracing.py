"""What a torch model computes, as a graph: traced by torch.export, with marks where it is to be cut.

    forward hooks of the named modules -> pipe_split() -> torch.export (sizes free) -> graph of operations

Owns the call of torch.export, the marks, and the check that later inputs are such as the graph was traced for. Must not
know pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hpctrain.adapters.torch.nests import map_tensors
from hpctrain.errors import ConfigError, UnsupportedError, choices, nearest

__all__ = ["INSTEAD", "Graph", "Inputs", "copied_arguments", "marked", "trace"]

INSTEAD = "cut this model by steps instead: hpctrain.torch.layers(model, steps)"


def copied_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `arguments`, with tensors that a model may write into. Raises ConfigError for anything but nests."""
    args, kwargs = arguments(example)
    try:
        return map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs)
    except UnsupportedError as error:
        raise ConfigError(f"example is not what a model can be traced for: {error}") from error


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tuple are positional arguments, a dict keyword ones, else it is the only one."""
    if type(value) is dict:
        return (), value
    return (value if type(value) is tuple else (value,)), {}


@contextmanager
def marked(model: torch.nn.Module, at: Sequence[str]) -> Iterator[list[str]]:
    """Within it each call of a named module leaves a mark in a graph, and its name in the list.

    Raises:
        ConfigError: an unknown or repeated name.
    """
    from torch.distributed.pipelining import pipe_split  # a second to import

    modules = dict(model.named_modules(remove_duplicate=False))
    for number, name in enumerate(at):
        if name not in modules:
            raise ConfigError(f"at has {name!r}{nearest(name, modules)}, which is no module of the model; legal are "
                              f"{choices([*modules][1:9])} ...")
        if name in at[:number]:
            raise ConfigError(f"at has {name!r} twice; legal is each name once")
    called: list[str] = []

    def mark(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: Any) -> None:
            called.append(name)
            pipe_split()
        return before

    hooks = [modules[name].register_forward_pre_hook(mark(name), prepend=True) for name in at]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


class Graph:
    """A traced model. `module` has the graph of torch operations, and the tensors that it reads, by the model's names.

    Attributes:
        inputs: makes the flat list of values that the graph begins with.
        outputs: makes of a flat list what the model returns; `flat_outputs` does the opposite.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.module = program.module()
        self.inputs = Inputs(program, self.module)
        self.outputs: Callable[[Sequence[Any]], Any] = program.call_spec.out_spec.unflatten
        self.flat_outputs: Callable[[Any], list[Any]] = program.call_spec.out_spec.flatten_up_to


class _Form(NamedTuple):
    """A tensor as the graph was traced for it; sizes that are free are names of symbols."""

    dtype: torch.dtype
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}({', '.join(self.sizes)})"


def _form(value: Any) -> _Form | None:
    return _Form(value.dtype, tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else None


class Inputs:
    """Turns what the model is called with into the graph's list of inputs, and refuses what it was not traced for."""

    def __init__(self, program: torch.export.ExportedProgram, module: torch.fx.GraphModule) -> None:
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._flatten, self._unflatten = program.call_spec.in_spec.flatten_up_to, program.call_spec.in_spec.unflatten
        self._traced = {str(node.target): _form(node.meta.get("val")) for node in nodes}
        self._guards = next((module.get_submodule(str(node.target)) for node in module.graph.nodes
                             if node.op == "call_module"), None)
        #: The smallest legal size of each symbol. torch takes sizes of 0 and 1 to be special: a graph that was traced
        #: for others may be wrong for these, where the model's code asks for them (`if x.shape[0] == 1`).
        self._least = {str(symbol): int(found.lower) for symbol, found in program.range_constraints.items()}

    def free(self) -> dict[str, list[tuple[str, int]]]:
        """For each symbol whose smallest size is 2: the (input, dim) that it stands for."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, form in self._traced.items():
            for dim, size in enumerate(() if form is None else form.sizes):
                if self._least.get(size) == 2:
                    found.setdefault(size, []).append((name, dim))
        return found

    def allow(self, symbols: Iterable[str], least: int) -> None:
        """From now on sizes from `least` are legal for these."""
        self._least.update(dict.fromkeys(symbols, least))

    def size(self, value: Any, place: tuple[str, int]) -> int:
        """The size of an (input, dim) of a value."""
        flat = dict(zip(self._traced, self._flatten(arguments(value)), strict=True))
        found: int = flat[place[0]].shape[place[1]]
        return found

    def narrowed(self, value: Any, places: Iterable[tuple[str, int]]) -> Any:
        """The value with sizes of 1 in these places."""
        flat = dict(zip(self._traced, self._flatten(arguments(value)), strict=True))
        for name, dim in places:
            flat[name] = flat[name].narrow(dim, 0, 1)
        args, kwargs = self._unflatten(list(flat.values()))
        return kwargs or args

    def __call__(self, value: Any) -> list[Any]:
        """The flat list. Raises ConfigError for another structure, dtype or shape than the graph is for."""
        try:
            flat: list[Any] = self._flatten(arguments(value))
        except ValueError as error:
            raise ConfigError(f"inputs have another structure than the example of split(...): {error}") from error
        given = dict(zip(self._traced, flat, strict=True))
        for name, traced in self._traced.items():
            if traced is not None:  # numbers, None and the like are compared by the guards
                self._compare(name, given[name], traced)
        try:
            if self._guards is not None:
                self._guards(*flat)
        except AssertionError as error:
            shapes = {name: tuple(v.shape) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
            raise ConfigError(f"inputs {shapes} are not what split(...) traced the model for: {error}. Give an example "
                              f"like these, or {INSTEAD}") from error
        return flat

    def _compare(self, name: str, given: Any, traced: _Form) -> None:
        found = _form(given)
        if found is None or found.dtype != traced.dtype or len(found.sizes) != len(traced.sizes):
            raise ConfigError(f"input {name!r} is {found or repr(given)}; legal is {traced}, as in the example of "
                              "split(...)")
        for dim, (size, symbol) in enumerate(zip(given.shape, traced.sizes, strict=True)):
            least = self._least.get(symbol, 0)
            if size < least:
                raise ConfigError(
                    f"input {name!r} has shape {tuple(given.shape)}; legal in dim {dim} are sizes from {least}: the "
                    "example of split(...) had more than 1 there, and with 1 the traced model is wrong. For sizes that "
                    "are always 1, give an example of 1")


def trace(model: torch.nn.Module, example: Any) -> Graph:
    """The graph of a call of the model, with its training flags as they are. All sizes are free that can be. Local.

    Raises:
        UnsupportedError: torch cannot trace it (values decide what is computed, say).
    """
    args, kwargs = copied_arguments(example)
    sizes = torch.export.ShapesCollection()
    map_tensors(lambda tensor: _leave_free(sizes, tensor), [args, kwargs])
    try:
        return Graph(torch.export.export(model, args, kwargs, dynamic_shapes=sizes))
    except Exception as error:
        text = str(error).strip().splitlines()
        raise UnsupportedError(f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: "
                               f"{text[0] if text else ''}; {INSTEAD}") from error


def _leave_free(sizes: Mapping[Any, Any], tensor: torch.Tensor) -> None:
    sizes[tensor] = dict.fromkeys(range(tensor.ndim), torch.export.Dim.AUTO)  # type: ignore[index]
