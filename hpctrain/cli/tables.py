"""The look of the tables of `hpctrain plan`, and sizes in words."""

from __future__ import annotations

from typing import Any

from rich.table import Table

__all__ = ["UNITS", "new_table", "power_of", "rows_table", "shown_bytes"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def new_table(title: str, *columns: str, words: tuple[str, ...] = ()) -> Any:
    """A table with headings: the first column and those in `words` stand at the left, numbers at the right."""
    table = Table(title=title, title_justify="left", min_width=60)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column in words else "right")
    return table


def rows_table(title: str, rows: list[tuple[str, str]]) -> Any:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def shown_bytes(count: float) -> str:
    """As people read it: 1.50 MiB."""
    power = power_of(count)
    return f"{count / 1024**power:,.{2 if power else 0}f} {UNITS[power]}"


def power_of(count: float) -> int:
    """The power of 1024 of the unit that `count` bytes are read in."""
    return min(len(UNITS) - 1, max(0, int(count).bit_length() - 1) // 10)
