"""A site's table of algorithms as a small TOML file.

    [[row]]
    operation = "all_reduce"
    bytes = [0, 65535]        # of the whole array, both ends included; [65536] means from there up
    ranks = [2, 2]
    dtypes = "plain"          # "any", "half" (added in a wider type), "plain" (all others), or one dtype
    algorithm = "recursive doubling"
    reason = "measured: 12 us, ring 19 us"

Everything but operation and algorithm may be left out. Owns the format. Must not know which row is taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.collectives.choice_row import ANY, RANGES, Range, Row
from hpctrain.errors import ConfigError, choices, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["format_rows", "parse_rows", "read_text"]

_KEYS = ("operation", *RANGES, "dtypes", "algorithm", "reason")


def read_text(path: str | Path) -> str:
    """The text of a table's file. Local. Raises ConfigError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the table of algorithms {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


def parse_rows(text: str, source: str) -> list[Row]:
    """The rows in `text`, in order. Their words are checked by `choice_row.check_rows`.

    Raises:
        ConfigError: not TOML, or a key or value of the wrong kind; names the row, counted from 1.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not a TOML file: {error}") from None
    for name in table:
        if name != "row":
            raise ConfigError(f"{source}: {name!r} is unknown; a table of algorithms holds [[row]] entries only")
    rows = table.get("row", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{source}: rows must be written as [[row]]")
    return [_row(values, f"{source}, row {number}") for number, values in enumerate(rows, start=1)]


def format_rows(rows: Sequence[Row], heading: str = "") -> str:
    """The text of a file that `parse_rows` reads back as `rows`, with `heading` as a comment above. Pure."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    for row in rows:
        lines += ["", "[[row]]", f"operation = {_quoted(row.operation)}"]
        for name in RANGES:
            low, high = getattr(row, name)
            if (low, high) != ANY:
                lines.append(f"{name} = {[low] if high is None else [low, high]}")
        if row.dtypes != "any":
            lines.append(f"dtypes = {_quoted(row.dtypes)}")
        lines += [f"algorithm = {_quoted(row.algorithm)}", f"reason = {_quoted(row.reason)}"]
    return "\n".join(lines) + "\n"


def _row(values: dict[str, Any], where: str) -> Row:
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key!r} is unknown{nearest(key, _KEYS)}; legal are {choices(_KEYS)}")
    for key in ("operation", "algorithm"):
        if key not in values:
            raise ConfigError(f"{where}: {key} is missing")
    words: dict[str, Any] = {"dtypes": "any", "reason": "the site's choice"}
    words |= {key: value for key, value in values.items() if key not in RANGES}
    for key, value in words.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} = {value!r} must be a string")
    ranges = {name: _range(values[name], f"{where}: {name}") for name in RANGES if name in values}
    return Row(**words | ranges)


def _range(value: object, where: str) -> Range:
    whole = isinstance(value, list) and all(type(number) is int for number in value)
    if not whole or len(value) not in (1, 2):  # type: ignore[arg-type]
        raise ConfigError(f"{where} = {value!r} must be [low] or [low, high] with whole numbers")
    low, high = (*value, None)[:2]  # type: ignore[misc]
    return low, high


def _quoted(text: str) -> str:
    """A basic string of TOML; JSON's are the same but for characters beyond 16 bits, which stay as they are."""
    return json.dumps(text, ensure_ascii=False)
