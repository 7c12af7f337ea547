"""The comms logger's rows as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from comm_utils.observability.comms_logger import Row
from comm_utils.observability.traces.waiting import Account, Key, Share
from comm_utils.sizes import format_size

__all__ = ["aligned_columns", "format_account", "format_table"]

_SPLIT_COLUMNS = ("operation", "size", "ranks", "calls", "total ms", "waiting ms", "transfer ms", "waiting")
# Of what all ranks waited for: who has less of it is not named.
_WORTH_NAMING = 0.02
_MOST_NAMED = 8


def _named(name: str, caller: str) -> str:
    return f"{name} ({caller})" if caller else name


def _compressed(row: Row) -> str:
    return f" as {row.method}, {format_size(row.wire_bytes)} sent" if row.method else ""


def _group(ranks: tuple[int, ...]) -> str:
    W = len(ranks)
    if ranks == tuple(range(W)):
        return str(W)
    return f"{W} {list(ranks)}" if W <= 8 else f"{W} [{ranks[0]} ... {ranks[-1]}]"


# Headings, and the text of a row under each.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "operation": lambda row: _named(row.name, row.caller) + _compressed(row),
    "size": lambda row: format_size(row.size_bytes),
    "ranks": lambda row: _group(row.ranks),
    "calls": lambda row: str(row.calls),
    "bytes": lambda row: format_size(row.total_bytes),
    "total ms": lambda row: f"{row.total_s * 1e3:.2f}",
    "min us": lambda row: f"{row.min_s * 1e6:.1f}",
    "median us": lambda row: f"{row.median_s * 1e6:.1f}",
    "p95 us": lambda row: f"{row.p95_s * 1e6:.1f}",
    "algbw GB/s": lambda row: f"{row.algbw_gb_per_s:.3f}",
    "busbw GB/s": lambda row: f"{row.busbw_gb_per_s:.3f}",
}


def format_table(rows: Iterable[Row]) -> str:
    """Rows as text."""
    return aligned_columns(tuple(_COLUMNS), [[text(row) for text in _COLUMNS.values()] for row in rows])


def aligned_columns(heading: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Cells under their heading; the first column to the left, the others to the right."""
    lines = [heading, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def format_account(account: Account) -> str:
    """Format where the time went, over all ranks, and the ranks that others waited for."""
    together: dict[Key, Share] = {}
    for shares in account.shares.values():
        for key, share in shares.items():
            total = together.setdefault(key, Share())
            total.calls += share.calls
            total.total_ns += share.total_ns
            total.waiting_ns += share.waiting_ns
    cells = [
        [
            _named(key[0], key[4]),
            format_size(key[2]),
            _group(key[3]),
            str(share.calls),
            f"{share.total_ns * 1e-6:.2f}",
            f"{share.waiting_ns * 1e-6:.2f}",
            f"{share.transfer_ns * 1e-6:.2f}",
            f"{share.waiting_ns / max(share.total_ns, 1):.0%}",
        ]
        for key, share in sorted(together.items())
    ]
    waited_ns = sum(share.waiting_ns for share in together.values())
    lines = [aligned_columns(_SPLIT_COLUMNS, cells)]
    named = [one for one in account.stragglers if one.caused_ns > _WORTH_NAMING * waited_ns]
    for one in named[:_MOST_NAMED]:
        where = f" ({one.host}, pid {one.pid})" if one.host else ""
        lines.append(
            f"rank {one.rank}{where} was waited for: the last in {one.last} of {account.operations} operations, "
            f"typically {one.typical_late_ns * 1e-6:.3g} ms after the one before it; "
            f"the others waited {one.caused_ns * 1e-6:.3g} ms, {one.caused_ns / waited_ns:.0%} of all waiting"
        )
    if not named:
        lines.append("no rank was waited for")
    return "\n".join(lines)
