"""Reads a config: TOML and `--set section.key=value` into one checked `Config`.

Owns parsing and type checks. Every wrong word is a ConfigError that names the option, the value, the legal ones and,
for a misspelt name, the nearest. Must not know what the options do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hpctrain.config.records import SECTIONS, Config, MeshAxes
from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.plan.mesh import AXES, Mesh

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["config_from", "read_config", "to_dict"]


def read_config(path: str | Path, settings: Iterable[str] = ()) -> Config:
    """The config in the TOML file `path`, with `settings` ("section.key=value") on top. Local.

    Raises:
        ConfigError: no such file, not TOML, or an option that is unknown or has an illegal value.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    table = _with_inner_sections(table)
    for setting in settings:
        section, key, value = _setting(setting)
        if isinstance(table.setdefault(section, {}), dict):
            table[section][key] = value
    return config_from(table)


def config_from(table: Mapping[str, Any]) -> Config:
    """The config with the options in `table` ({section: {key: value}}); all others have their defaults."""
    sections: dict[str, Any] = {}
    for name, values in _with_inner_sections(table).items():
        if name not in SECTIONS:
            raise ConfigError(f"section [{name}] is unknown{nearest(name, SECTIONS)}; legal are {choices(SECTIONS)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{name}] must be a section with `key = value` lines, not {values!r}")
        sections[_field(name)] = _mesh(values) if name == "mesh" else _section(name, values)
    config = Config(**sections)
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """Options that are legal one by one and must fit each other."""
    model, trace_step = config.model, config.pipeline.trace_step
    if trace_step is not None and config.pipeline.trace is None:
        raise ConfigError(f"pipeline.trace_step = {trace_step} needs pipeline.trace, the file")
    if trace_step is not None and trace_step > config.run.steps:
        raise ConfigError(f"pipeline.trace_step = {trace_step} must be at most run.steps = {config.run.steps}")
    if model.kind != "gpt":
        return
    if model.width % model.heads:
        raise ConfigError(f"model.heads = {model.heads} must divide model.width = {model.width}")
    if model.positions == "rotary" and model.width // model.heads % 2:
        raise ConfigError(f"model.width / model.heads = {model.width // model.heads} must be even for "
                          "model.positions = 'rotary'; or take 'learned'")
    if config.length > model.context:
        raise ConfigError(f"data.length = {config.length} must be at most model.context = {model.context}")


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain data, ready for JSON and again for `config_from` (options without a value left out)."""
    names = {_field(name): name for name in SECTIONS}
    table = {names[field]: {key.rstrip("_"): value for key, value in section.items() if value is not None}
             for field, section in asdict(config).items()}
    table["mesh"] = dict(config.mesh.lengths)
    return table


def _field(section: str) -> str:
    return section.rpartition(".")[2]


def _with_inner_sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with [zero.offload], which TOML puts into [zero], as a section of its own."""
    flat = {name: dict(values) if isinstance(values, Mapping) else values for name, values in table.items()}
    for name in SECTIONS:
        outer, dot, inner = name.rpartition(".")
        if dot and isinstance(flat.get(outer), dict) and inner in flat[outer]:
            flat[name] = flat[outer].pop(inner)
    return flat


def _setting(text: str) -> tuple[str, str, Any]:
    """`section.key=value`: the value is TOML; what is not TOML is taken as a string."""
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().rpartition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {text!r} must have the form section.key=value")
    try:
        return section, key, tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, raw.strip()


def _section(name: str, values: Mapping[str, Any]) -> Any:
    record = SECTIONS[name]
    hints = get_type_hints(record)
    options = {field.name.rstrip("_"): field for field in fields(record)}
    checked = {}
    for key, value in values.items():
        if key not in options:
            hint = nearest(key, options) or _elsewhere(key)
            raise ConfigError(f"option {name}.{key} is unknown{hint}; legal are {choices(options)}")
        field = options[key]
        checked[field.name] = _checked(f"{name}.{key}", value, hints[field.name], field.metadata)
    return record(**checked)


def _elsewhere(key: str) -> str:
    """A hint for an option that stands in the wrong section."""
    places = [f"{name}.{key}" for name, record in SECTIONS.items() if key in {f.name for f in fields(record)}]
    return f" (did you mean {choices(places)}?)" if places else ""


def _checked(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    kind, also = hint, ""
    if any(get_origin(arg) is tuple for arg in get_args(hint)):
        if isinstance(value, list | tuple):
            return _checked_list(name, value, limits)
        also = ", or a list of integers"
    if get_origin(hint) is UnionType or NoneType in get_args(hint):
        kind = next(arg for arg in get_args(hint) if arg is not NoneType)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name} = {value!r} must be {words[kind]}{also}")
    legal, low, high = limits["legal"], limits["low"], limits["high"]
    if legal and value not in legal:
        hint = nearest(str(value), map(str, legal))
        raise ConfigError(f"{name} = {value!r}{hint} is not legal; legal are {choices(legal)}{also}")
    if kind is float and not isfinite(value):
        raise ConfigError(f"{name} = {value!r} must be a finite number")
    if low is not None and kind is not str and value < low:
        raise ConfigError(f"{name} = {value!r} must be at least {low:g}")
    if high is not None and value > high:
        raise ConfigError(f"{name} = {value!r} must be at most {high:g}")
    return value


def _checked_list(name: str, values: Sequence[Any], limits: Mapping[str, Any]) -> tuple[int, ...]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < limits["low"]:
            raise ConfigError(f"{name} = {list(values)!r}: {value!r} must be an integer of at least {limits['low']:g}")
    return tuple(values)


def _mesh(values: Mapping[str, Any]) -> MeshAxes:
    for axis, length in values.items():
        if axis == "data" and length == 0 and not isinstance(length, bool):
            continue
        if axis in AXES or isinstance(length, int):
            Mesh({axis: length})  # raises for an unknown axis or a length below 1
        else:
            raise ConfigError(f"mesh axis {axis!r} is unknown{nearest(axis, AXES)}; legal are {choices(AXES)}")
    return MeshAxes(tuple(values.items()))
