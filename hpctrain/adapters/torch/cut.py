"""The modules of one stage of a chain, under the whole model's names.

    bounds (0, 2, 4)        stage 0: embedding, blocks.0            stage 1: blocks.1, norm, head

A parameter that several stages use (tied embeddings) goes by its first name on all of them, so that a checkpoint does
not know of stages; each stage has its own copy. Must not know how a stage is run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from hpctrain.adapters.torch.layers import Buffer, Chain, Part, TorchLayer, parameters_of
from hpctrain.errors import ConfigError
from hpctrain.plan.split import bounds as even_bounds

__all__ = ["check_bounds", "shared_with", "stage_layers", "tree"]


def check_bounds(bounds: Sequence[int] | int, num_layers: int) -> tuple[int, ...]:
    """The bounds of the stages; from a number of stages, as many layers in each as divide.

    Raises:
        ConfigError: they do not ascend from 0 to the number of layers.
    """
    cuts = even_bounds(num_layers, bounds) if isinstance(bounds, int) and bounds > 0 else bounds
    if isinstance(cuts, int) or len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != num_layers or \
            any(start > stop for start, stop in pairwise(cuts)):
        raise ConfigError(f"bounds = {bounds!r}; legal are a number of stages, and numbers that ascend from 0 to "
                          f"{num_layers}, the number of layers")
    return tuple(cuts)


def _users(whole: Chain, bounds: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The stages that use a parameter or buffer, by its identity."""
    users: dict[int, set[int]] = {}
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for layer in whole.layers[start:stop]:
            for part in layer.parts.values():
                for tensor in _tensors(part):
                    users.setdefault(id(tensor), set()).add(number)
    return {key: tuple(sorted(numbers)) for key, numbers in users.items()}


def shared_with(whole: Chain, bounds: Sequence[int], stage: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a stage that other stages use as well, each with all of its stages."""
    users = _users(whole, bounds)
    parts = [pair for layer in whole.layers[bounds[stage]: bounds[stage + 1]] for pair in layer.parts.items()]
    found = {whole.names[name][0]: users[id(p)] for path, part in parts for name, p in parameters_of(path, part)}
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def stage_layers(whole: Chain, bounds: Sequence[int], stage: int) -> list[TorchLayer]:
    """The layers of a stage. What an earlier stage has as well is copied, and nothing else; makers of modules run."""
    users = _users(whole, bounds)
    memo: dict[int, Any] = {}  # of all copies, so that they stay tied with each other
    made: dict[int, Any] = {}

    def own(part: Part) -> Part:
        if not isinstance(part, torch.nn.Module | torch.nn.Parameter | Buffer):
            if id(part) not in made:
                made[id(part)] = part()
            return made[id(part)]
        mine = [tensor for tensor in _tensors(part) if users[id(tensor)][0] == stage]
        if len(mine) == len(list(_tensors(part))):
            return part
        memo.update((id(tensor), tensor) for tensor in mine)
        return copy.deepcopy(part, memo)

    return [TorchLayer({path: own(part) for path, part in layer.parts.items()}, layer.run)
            for layer in whole.layers[bounds[stage]: bounds[stage + 1]]]


def _tensors(part: Part) -> Iterable[torch.Tensor]:
    """The parameters and buffers of a part."""
    if isinstance(part, torch.nn.Parameter):
        yield part
    elif isinstance(part, Buffer):
        yield part.tensor
    elif isinstance(part, torch.nn.Module):
        yield from part.parameters()
        yield from part.buffers()


def tree(layers: Iterable[TorchLayer]) -> torch.nn.Module:
    """A module that has the parts of the layers under their names."""
    root = torch.nn.ModuleDict()
    for layer in layers:
        for path, part in layer.parts.items():
            node = root
            *above, last = path.split(".")
            for name in above:
                node = node._modules.setdefault(name, torch.nn.ModuleDict())
            if isinstance(part, Buffer):
                node._buffers[last] = part.tensor  # register_buffer refuses names that a ModuleDict has for itself
                node._non_persistent_buffers_set.update(() if part.persistent else (last,))
                continue
            (node._parameters if isinstance(part, torch.nn.Parameter) else node._modules)[last] = part
    return root
