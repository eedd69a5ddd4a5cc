"""Which parameters of a module are used together, and by the calls of which modules.

    ModuleList, Sequential, ModuleDict    each child is one unit, with all that is in it (a transformer's blocks)
    a module with parameters of its own   one unit, with what is in it, unless there are such blocks in it
    the model's own parameters            one unit
    shared by several of these            a unit of its own, which each of them needs

Pure: looks at a module, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.nn.utils import parametrize

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["User", "find_units"]

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_LISTS = (*_CONTAINERS, torch.nn.ParameterList, torch.nn.ParameterDict)  # their own forward may never run


@dataclass(frozen=True)
class User:
    """A module whose calls read the parameters of `units` (ascending)."""

    module: torch.nn.Module
    units: tuple[int, ...]


def find_units(module: torch.nn.Module, names: dict[torch.nn.Parameter, str],
               patterns: Sequence[str] = ()) -> tuple[tuple[tuple[str, ...], ...], tuple[User, ...]]:
    """(names of the parameters of each unit, the modules that use them).

    Args:
        module: the whole model.
        names: what each parameter goes by.
        patterns: globs of module names ("" is the whole model). A module that matches is a user of all parameters
            beneath it, but for those beneath a match further down. The rule above is for parameters under no match.
    """
    paths = dict(module.named_modules(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ConfigError(f"units has {pattern!r}, which matches no module{nearest(pattern, paths)}; legal are "
                              f"globs of {choices(list(paths)[:8])} ...")
    chosen = {path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)}
    by_rule = set(_by_rule(module, ""))
    users: dict[torch.nn.Parameter, list[int]] = {}
    order: dict[torch.nn.Module, int] = {}
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        owner = paths[_user(full_name.rpartition(".")[0], chosen, by_rule)]
        number = order.setdefault(owner, len(order))
        if number not in users.setdefault(parameter, []):
            users[parameter].append(number)
    units: dict[tuple[int, ...], list[str]] = {}
    for parameter, numbers in users.items():
        units.setdefault(tuple(sorted(numbers)), []).append(names[parameter])
    keys = list(units)
    found = [User(part, tuple(u for u, key in enumerate(keys) if number in key)) for part, number in order.items()]
    return tuple(tuple(members) for members in units.values()), tuple(found)


def _user(path: str, chosen: set[str], by_rule: set[str]) -> str:
    """The nearest of the path's modules, itself first, that was chosen, else that the rule names."""
    above = [path]
    while above[-1]:
        above.append(above[-1].rpartition(".")[0])
    for candidates in (chosen, by_rule):
        for candidate in above:
            if candidate in candidates:
                return candidate
    return ""


def _by_rule(module: torch.nn.Module, path: str, in_container: bool = False) -> Iterator[str]:
    """The paths of the modules that use parameters: what is under two of them belongs to the nearer one."""
    block = in_container and not isinstance(module, _CONTAINERS)
    direct = parametrize.is_parametrized(module) or any(True for _ in module.parameters(recurse=False))
    direct = direct and not isinstance(module, _LISTS)
    if block or direct:
        yield path
    if block or (direct and path and not _has_blocks(module)):
        return
    for name, child in module.named_children():
        yield from _by_rule(child, f"{path}.{name}" if path else name, isinstance(module, _CONTAINERS))


def _has_blocks(module: torch.nn.Module) -> bool:
    if parametrize.is_parametrized(module):
        return False
    return any(isinstance(part, _CONTAINERS) and any(True for _ in part.parameters()) for part in module.modules())
