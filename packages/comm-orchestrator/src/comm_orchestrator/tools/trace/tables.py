"""Tables for people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["MOST_ROWS", "clipped", "milliseconds", "render", "share", "table"]

#: What people read of a table; programs read --json.
MOST_ROWS = 40
# Where nobody looks at it, lines are as long as they have to be, for grep.
_UNLIMITED = 10_000


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = (0,)) -> Table:
    """A table with ``left`` columns to the left and all others to the right."""
    aligned_left = set(left)
    found = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        title=title or None,
        title_justify="left",
    )
    for place, name in enumerate(columns):
        found.add_column(
            Text(name), justify="left" if place in aligned_left else "right", overflow="fold", no_wrap=place == 0
        )
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def clipped(rows: Sequence[Sequence[str]], columns: int) -> list[Sequence[str]]:
    """The first rows, and a last one that says how many more there are."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    more = f"... {len(rows) - MOST_ROWS} more: --json has all"
    return [*rows[:MOST_ROWS], [more, *[""] * (columns - 1)]]


def milliseconds(seconds: float) -> str:
    """``seconds`` as milliseconds, with four digits that count."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def share(value: float | None) -> str:
    """As a percentage; nothing for what is not known."""
    return "" if value is None else f"{value:.0%}"


def render(parts: Iterable[Table | str], stream: TextIO) -> str:
    """Tables and lines one below the other, as wide as the terminal ``stream`` or ``COLUMNS``, else as needed."""
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() and int(columns) else _UNLIMITED
    console = Console(file=stream, highlight=False, width=width)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number and not isinstance(part, str):
                console.print()
            console.print(Text(part) if isinstance(part, str) else part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
