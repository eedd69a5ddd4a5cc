"""A torch model as a chain of layers.

    model       embedding   blocks.0   blocks.1   norm, head        layer: (names of modules, function)

Owns the chain and the names of its parameters, which are those of the whole model. Must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["Buffer", "Chain", "Part", "Step", "TorchLayer", "chain", "linked", "parameters_of", "trains"]

Part = Any  # a module, parameter or `Buffer`, or a function without arguments that makes a module

#: What `chain` takes for a layer: the name of a module, or names and `function(*modules, value) -> value`.
Step = str | tuple[str | Sequence[str], Callable[..., Any]]


@dataclass(frozen=True)
class Buffer:
    """A buffer as a part of its own."""

    tensor: torch.Tensor
    persistent: bool


@dataclass(frozen=True)
class TorchLayer:
    """One link: `run(*parts, value)` gives the next value. `parts` go by their names in the whole model."""

    parts: Mapping[str, Part]
    run: Callable[..., Any]


@dataclass(frozen=True)
class Chain:
    """The whole model. `names` has all names of a parameter, its first one first, for each of its names."""

    layers: tuple[TorchLayer, ...]
    names: Mapping[str, tuple[str, ...]]


def chain(model: Any, steps: Sequence[Step] | None = None) -> Chain:
    """A model as a chain. Local.

    Args:
        model: with `steps`, any module. Without, an nn.Sequential, or a list of modules, each called with what the one
            before returned; they are named by their number. An entry of a list may also be a function without
            arguments that makes the module, which is called where the layer's stage is made only.
        steps: what runs after what. A step is the name of a module of the model ("blocks.0"), which is called with the
            value, or (names, function): `function(*modules, value)`, which must not use the model otherwise. A name
            may be that of a parameter.

    Raises:
        ConfigError: an unknown name, or a parameter of the model that no step has.
    """
    if steps is None:
        entries = list(model) if isinstance(model, (Sequence, torch.nn.Sequential, torch.nn.ModuleList)) else None
        if entries is None:
            raise ConfigError(f"model is {type(model).__name__}; legal are an nn.Sequential and a list of modules, or "
                              "any module with steps = [name of a module, or (names, function), ...]; "
                              "hpctrain.torch.split cuts any at named submodules")
        layers = [TorchLayer({str(number): entry}, _call) for number, entry in enumerate(entries)]
    else:
        layers = [_layer(model, step) for step in steps]
    return linked(layers, None if steps is None else model)


def linked(layers: Sequence[TorchLayer], model: torch.nn.Module | None) -> Chain:
    """The layers as a chain; of the whole model if there is one. Raises ConfigError as `chain` does."""
    in_layers = [pair for layer in layers for path, part in layer.parts.items() for pair in parameters_of(path, part)]
    found: dict[int, list[str]] = {}
    for name, parameter in in_layers if model is None else model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    left = set(found) - {id(parameter) for _, parameter in in_layers}
    if left:
        name = found[left.pop()][0]
        raise ConfigError(f"parameter {name!r} of the model is in no step; each must be in at least one")
    return Chain(tuple(layers), {name: tuple(names) for names in found.values() for name in names})


def _layer(model: torch.nn.Module, step: Step) -> TorchLayer:
    names, run = (step, _call) if isinstance(step, str) else step
    names = (names,) if isinstance(names, str) else tuple(names)
    return TorchLayer({name: _part(model, name) for name in names}, run)


def _part(model: torch.nn.Module, name: str) -> Part:
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in modules and name not in parameters:
        legal = [*modules, *parameters]
        raise ConfigError(f"a step has {name!r}{nearest(name, legal)}, which is no module or parameter of the model; "
                          f"legal are {choices([*modules][1:9])} ...")
    return modules[name] if name in modules else parameters[name]


def _call(part: Callable[[Any], Any], value: Any) -> Any:
    return part(value)


def parameters_of(path: str, part: Part) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """The parameters of a part, each under all of its names in the whole model."""
    if isinstance(part, torch.nn.Parameter):
        return [(path, part)]
    if isinstance(part, torch.nn.Module):
        return part.named_parameters(path, remove_duplicate=False)
    return []


def trains(layers: Iterable[TorchLayer]) -> bool:
    """Whether any parameter of the layers is trained; taken to be so where a module is not made yet."""
    parts = [(path, part) for layer in layers for path, part in layer.parts.items()]
    return any(parameter.requires_grad for path, part in parts for _, parameter in parameters_of(path, part)) or any(
        not isinstance(part, torch.nn.Module | torch.nn.Parameter | Buffer) for _, part in parts)
