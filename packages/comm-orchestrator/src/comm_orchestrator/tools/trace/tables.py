"""Print tables of times and bytes as wide as the terminal; the summary of a trace is made of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.fitted_table import FittedTable
from comm_orchestrator.tools.output import printable
from comm_orchestrator.tools.trace.summary import OperationRow, Summary
from comm_utils.sizes import format_size

__all__ = [
    "MOST_ROWS",
    "clipped",
    "format_summary",
    "milliseconds",
    "missing",
    "render",
    "share",
    "significant",
    "table",
]

#: What people read of a table; programs read --json.
MOST_ROWS = 40
# Where nobody looks at it, lines are as long as they have to be, for grep.
_UNLIMITED = 10_000


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> FittedTable:
    """Make a table with the columns ``left`` left-aligned; the others hold numbers, which are never broken."""
    found = FittedTable(columns, left)
    for row in rows:
        found.add_row(*row)
    return found


def clipped(rows: Sequence[Sequence[str]], columns: int) -> list[Sequence[str]]:
    """Return the first rows, and a last one that says how many more there are."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    more = f"... {len(rows) - MOST_ROWS} more: --json has all"
    return [*rows[:MOST_ROWS], [more, *[""] * (columns - 1)]]


def milliseconds(seconds: float) -> str:
    """``seconds`` as milliseconds, with four digits that count."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def significant(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a percentage; "" for what is not known."""
    return "" if value is None else f"{value:.0%}"


def render(parts: Iterable[FittedTable | str], stream: TextIO) -> str:
    """Tables and lines one below the other, as wide as the terminal ``stream`` or ``COLUMNS``, else as needed."""
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdecimal() and int(columns) else _UNLIMITED
    console = Console(file=stream, highlight=False, width=width)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number and not isinstance(part, str):
                console.print()
            console.print(Text(printable(part)) if isinstance(part, str) else part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


_OPERATIONS = ("operation", "size", "group", "calls", "total ms", "waiting", "transfer", "async", "hidden")
_TIMES = ("operation", "size", "group", "min us", "median us", "p95 us", "max us", "algbw GB/s", "busbw GB/s")
_RANKS = ("rank", "host", "pid", "calls", "in calls ms", "of the job", "under way", "waiting ms", "clock ± us")
_STRAGGLERS = ("waited for", "host", "pid", "was last", "others waited ms", "usually late by ms")


def format_summary(found: Summary, stream: TextIO) -> str:
    """``found`` as tables."""
    W = found.world_size
    head = f"{W} rank{'s' if W != 1 else ''}" + (f" on {found.backend}" if found.backend else "")
    head += f", {found.wall_s:.3f} s from the first call to the last completion"
    operations, times = map(_operation, found.operations), map(_times, found.operations)
    ranks = [
        [
            str(row.rank),
            row.host,
            str(row.pid),
            str(row.calls),
            milliseconds(row.blocked_s),
            share(row.blocked_share),
            share(row.progress_share),
            milliseconds(row.waiting_s),
            f"{row.clock_uncertainty_s * 1e6:.1f}",
        ]
        for row in found.ranks
    ]
    stragglers = [
        [
            f"rank {row.rank}",
            row.host,
            str(row.pid),
            f"{row.last} of {found.matched}",
            milliseconds(row.caused_s),
            milliseconds(row.typical_late_s),
        ]
        for row in found.stragglers
    ]
    parts: list[FittedTable | str] = [
        head,
        table(_OPERATIONS, clipped(list(operations), len(_OPERATIONS)), left=(0, 2)),
        table(_TIMES, clipped(list(times), len(_TIMES)), left=(0, 2)),
        table(_RANKS, clipped(ranks, len(_RANKS)), left=(0, 1)),
        *([table(_STRAGGLERS, clipped(stragglers, len(_STRAGGLERS)), left=(0, 1))] if stragglers else []),
    ]
    notes = missing(found)
    return render([*parts, *([""] if notes else []), *notes], stream)


def _named(row: OperationRow) -> list[str]:
    name = f"{row.name} as {row.method}" if row.method else row.name
    if row.caller:
        name += f" ({row.caller})"
    return [name, format_size(row.size_bytes), row.group]


def _operation(row: OperationRow) -> list[str]:
    accounted = row.accounted_s > 0
    return [
        *_named(row),
        str(row.calls),
        milliseconds(row.total_s),
        share(row.waiting_s / row.accounted_s if accounted else None),
        share(row.transfer_s / row.accounted_s if accounted else None),
        str(row.asynchronous or ""),
        share(row.hidden_share),
    ]


def _times(row: OperationRow) -> list[str]:
    return [
        *_named(row),
        *(significant(value * 1e6) for value in (row.min_s, row.median_s, row.p95_s, row.max_s)),
        significant(row.algbw_gb_per_s),
        significant(row.busbw_gb_per_s),
    ]


def missing(found: Summary) -> list[str]:
    """List the facts that the trace does not have, a line each."""
    lines = []
    if found.unmatched:
        lines.append(
            f"the record of a rank is missing for {found.unmatched} of the calls, which are in no split of waiting and "
            "transfer"
        )
    dropped = [row for row in found.ranks if row.dropped]
    if dropped:
        total = sum(row.dropped for row in dropped)
        lines.append(f"{total} events were dropped while recording, on {format_ranks([row.rank for row in dropped])}")
    cut = [row.rank for row in found.ranks if not row.complete]
    if cut:
        lines.append(f"the recording of {format_ranks(cut)} was cut off")
    return lines
