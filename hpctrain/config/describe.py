"""Every option with its type, default, legal values and meaning, as the text of a TOML file.

Owns the layout of that text only; the words come from `records`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from hpctrain.config.records import SECTIONS

__all__ = ["describe_options"]


def describe_options() -> str:
    """A commented TOML file with all options at their defaults."""
    lines = ["# Relative paths are relative to the directory in which the job is started.",
             "# On the command line: --set section.key=value"]
    for section, record in SECTIONS.items():
        first = (record.__doc__ or "").splitlines()[0]
        lines += ["", f"[{section}]", f"# {first}"]
        lines += _mesh() if section == "mesh" else _options(record)
    return "\n".join(lines) + "\n"


def _mesh() -> list[str]:
    return ["# data = 2", "#     Ranks along an axis; data when left out or 0: all ranks that remain.",
            "# pipeline = 2",
            "#     Stands before data: the ranks of one stage are neighbours.",
            "#     Training uses these two axes; tensor, context and expert are for `hpctrain plan`."]


def _options(record: type) -> Iterator[str]:
    for field in fields(record):
        assert field.default is not MISSING
        key, limits = field.name.rstrip("_"), field.metadata
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f'"{value}"' if isinstance(value, str) and not isinstance(field.default, bool) else value
        yield f"# {key} =" if value is None else f"{key} = {shown}"
        legal = [f'"{v}"' if isinstance(v, str) else str(v) for v in limits["legal"]]
        yield f"#     {limits['doc']}" + (f" One of: {', '.join(legal)}." if legal else "")
