"""A comparison for people."""

from __future__ import annotations

from typing import TextIO

from comm_orchestrator.tools.trace.comparing import Comparison, Row
from comm_orchestrator.tools.trace.tables import clipped, milliseconds, render, table
from comm_utils.observability.traces.labels import shortened
from comm_utils.sizes import format_size

__all__ = ["text"]

# Of times, in milliseconds, the recorded one and then the replayed one.
_COLUMNS = (
    "operation",
    "size",
    "group",
    "calls",
    "bytes",
    "time",
    "again",
    "ratio",
    "waiting",
    "again",
    "transfer",
    "again",
)


def text(found: Comparison, stream: TextIO) -> str:
    """``found`` as a table."""
    rows = [_cells(row, found.world_size) for row in found.rows]
    total = sum(row.recorded_s for row in found.rows), sum(row.replayed_s for row in found.rows)
    calls, size = (sum(getattr(row, name) for row in found.rows) for name in ("replayed_calls", "replayed_bytes"))
    cells = ["total", "", "", str(calls), format_size(size), *map(milliseconds, total), _ratio(*total), "", "", "", ""]
    how = "with the pauses of the job" if found.keep_gaps else "without pauses, as fast as possible"
    walls = f"{found.recorded_wall_s:.3f} s recorded, {found.replayed_wall_s:.3f} s replayed"
    told = found.recorded_backend or "an unknown backend"
    return render(
        [
            f"recorded on {told}, replayed on {found.replayed_backend} {how}; times in ms, of all ranks together",
            table("", _COLUMNS, [*clipped(rows, len(_COLUMNS)), cells], left=(0, 2)),
            "",
            f"from the first call to the last completion: {walls}",
            *found.notes,
            _verdict(found),
        ],
        stream,
    )


def _verdict(found: Comparison) -> str:
    if found.same:
        return "the replay has moved exactly the recorded bytes"
    wrong = [row for row in found.rows if not row.same]
    row = wrong[0]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"the replay has not moved the recorded bytes: {row.operation} of {format_size(row.size_bytes)}: recorded "
        f"{row.recorded_calls} calls with {row.recorded_bytes} bytes, replayed {row.replayed_calls} with "
        f"{row.replayed_bytes}{more}"
    )


def _cells(row: Row, world_size: int) -> list[str]:
    same = row.same
    return [
        row.operation,
        format_size(row.size_bytes),
        "world" if len(row.ranks) == world_size else shortened(row.ranks),
        str(row.recorded_calls) if same else f"{row.recorded_calls} -> {row.replayed_calls}",
        format_size(row.recorded_bytes) if same else f"{row.recorded_bytes} -> {row.replayed_bytes}",
        milliseconds(row.recorded_s),
        milliseconds(row.replayed_s),
        _ratio(row.recorded_s, row.replayed_s),
        *(
            "" if value is None else milliseconds(value)
            for value in (
                row.recorded_waiting_s,
                row.replayed_waiting_s,
                row.recorded_transfer_s,
                row.replayed_transfer_s,
            )
        ),
    ]


def _ratio(recorded_s: float, replayed_s: float) -> str:
    return f"{replayed_s / recorded_s:.2f}" if recorded_s > 0 else ""
