"""A table that fits the terminal without breaking a name or a number."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from comm_orchestrator.tools.output import printable

__all__ = ["FittedTable"]


class FittedTable:
    """Columns of text and numbers; where they do not fit, some columns become a line above the row.

    Args:
        columns: their titles, which may be broken between words.
        left: places of the columns that are left-aligned; the others hold numbers.
        above: places of the columns that stand above the row where the terminal is narrow.
    """

    def __init__(self, columns: Sequence[str], left: Collection[int] = (0,), above: Sequence[int] = (0,)) -> None:
        self._columns, self._left, self._above = list(columns), left, above
        self._rows: list[list[str]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row, with escapes for what is not printable; cells that are missing at its end are empty."""
        self._rows.append([*map(printable, cells), *[""] * (len(self._columns) - len(cells))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._width(place) for place in range(len(self._columns))]
        gaps, whole = len(widths) - 1, [max(*pair) for pair in zip(widths, map(len, self._columns), strict=True)]
        if sum(whole) + 2 * gaps <= options.max_width:
            yield self._as_table(whole, 1)
        elif sum(widths) + gaps <= options.max_width:
            yield self._as_table(widths, int(sum(widths) + 2 * gaps <= options.max_width))
        else:
            yield Text("\n".join(self._lines(options.max_width, "-" if options.ascii_only else "─")))

    def _width(self, place: int) -> int:
        cells = [len(row[place]) for row in self._rows]
        return max(*map(len, self._columns[place].split()), *cells, 0, 0)

    def _as_table(self, widths: Sequence[int], padding: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, padding), pad_edge=False, show_edge=False, collapse_padding=True)
        for place, name in enumerate(self._columns):
            justify = "left" if place in self._left else "right"
            table.add_column(Text(name), justify=justify, width=widths[place])  # type: ignore[arg-type]
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table

    def _lines(self, width: int, rule: str) -> list[str]:
        places = [place for place in range(len(self._columns)) if place not in self._above]
        widths = [self._width(place) for place in places]
        gap = " " * (2 if sum(widths) + 2 * len(widths) <= width else 1)

        def line(cells: Sequence[str]) -> str:
            pairs = zip(places, cells, widths, strict=True)
            return (gap + gap.join(f"{c:<{w}}" if p in self._left else f"{c:>{w}}" for p, c, w in pairs)).rstrip()

        titles = [textwrap.wrap(self._columns[place], size) for place, size in zip(places, widths, strict=True)]
        height = max(map(len, titles))
        stacked = [["", *[""] * (height - len(title) - 1), *title][-height:] for title in titles]
        above = ", ".join(self._columns[place] for place in self._above)
        lines = [above, *map(line, zip(*stacked, strict=True))]
        lines.append(rule * min(width, max(map(len, lines))))
        before = ""
        for row in self._rows:
            named = ", ".join(filter(None, (row[place] for place in self._above)))
            if named and named != before:
                lines.append(named)
                before = named
            if any(row[place] for place in places):
                lines.append(line([row[place] for place in places]))
        return lines
