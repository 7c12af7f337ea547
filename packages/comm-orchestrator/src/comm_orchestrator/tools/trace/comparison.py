"""Compare a replay with what was recorded, and print the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeAlias

from comm_orchestrator.tools.trace.intervals import span_ns
from comm_orchestrator.tools.trace.matching import kind_of
from comm_orchestrator.tools.trace.tables import clipped, milliseconds, render, table
from comm_utils.observability.traces import Operation, RankTrace
from comm_utils.observability.traces.labels import shortened
from comm_utils.observability.traces.waiting import divided
from comm_utils.sizes import format_size

__all__ = ["Comparison", "Row", "Tally", "compare", "format_comparison", "tally", "together_with"]

#: What is compared: operation, size in bytes, the group's ranks.
Key: TypeAlias = tuple[str, int, tuple[int, ...]]


@dataclass
class Tally:
    """Operations that are alike, over all ranks; each rank's call counts.

    Attributes:
        waiting_ns, accounted_ns: of calls whose time could be split, their waiting and their time.
    """

    calls: int = 0
    size_bytes: int = 0
    total_ns: int = 0
    waiting_ns: int = 0
    accounted_ns: int = 0

    def add(self, other: Tally) -> None:
        """Add what ``other`` has."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Row:
    """One operation of both; waiting and transfer are shares of the time, None where they are not known."""

    operation: str
    size_bytes: int
    ranks: tuple[int, ...]
    recorded_calls: int
    replayed_calls: int
    recorded_bytes: int
    replayed_bytes: int
    recorded_s: float
    replayed_s: float
    recorded_waiting_s: float | None
    replayed_waiting_s: float | None
    recorded_transfer_s: float | None
    replayed_transfer_s: float | None

    @property
    def same(self) -> bool:
        """Return the replay has moved exactly what was recorded."""
        return (self.recorded_calls, self.recorded_bytes) == (self.replayed_calls, self.replayed_bytes)


@dataclass(frozen=True)
class Comparison:
    """All of it.

    Attributes:
        recorded_wall_s, replayed_wall_s: from the first call to the last completion.
        keep_gaps: whether the replay paused where the job had computed.
    """

    world_size: int
    recorded_backend: str
    replayed_backend: str
    recorded_wall_s: float
    replayed_wall_s: float
    keep_gaps: bool
    notes: list[str]
    rows: list[Row]

    @property
    def same(self) -> bool:
        """Return the replay has moved exactly what was recorded."""
        return all(row.same for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rows = [{**asdict(row), "same": row.same} for row in self.rows]
        return {"format": "comm-replay", "version": 1, "same": self.same, **asdict(self), "rows": rows}


def _key(operation: Operation) -> Key:
    return kind_of(operation), operation.size_bytes, operation.ranks


def tally(traces: Sequence[RankTrace]) -> dict[Key, Tally]:
    """Summarise ``traces``; waiting only where they are of all ranks and aligned."""
    found: dict[Key, Tally] = {}
    for trace in traces:
        for event in trace.events:
            size = event.operation.size_bytes
            found.setdefault(_key(event.operation), Tally()).add(Tally(1, size, event.duration_ns))
    for calls, waited in divided(traces):
        for rank, (waiting_ns, _) in waited.items():
            one = found[_key(calls[rank].operation)]
            one.waiting_ns += waiting_ns
            one.accounted_ns += calls[rank].duration_ns
    return found


def together_with(tallies: Iterable[Mapping[Key, Tally]]) -> dict[Key, Tally]:
    """Return the sums of ``tallies``."""
    found: dict[Key, Tally] = {}
    for one in tallies:
        for key, value in one.items():
            found.setdefault(key, Tally()).add(value)
    return found


def compare(
    recorded: Sequence[RankTrace],
    replayed: Mapping[Key, Tally],
    replayed_wall_ns: int,
    replayed_backend: str,
    keep_gaps: bool,
    notes: Sequence[str],
) -> Comparison:
    """Both side by side, what took longest first."""
    then = tally(recorded)
    begin, end = span_ns(recorded)
    rows = [_compared(key, then.get(key, Tally()), replayed.get(key, Tally())) for key in {**then, **replayed}]
    return Comparison(
        world_size=recorded[0].world_size,
        recorded_backend=", ".join(sorted({trace.backend for trace in recorded if trace.backend})),
        replayed_backend=replayed_backend,
        recorded_wall_s=(end - begin) * 1e-9,
        replayed_wall_s=replayed_wall_ns * 1e-9,
        keep_gaps=keep_gaps,
        notes=list(notes),
        rows=sorted(rows, key=lambda row: (-row.recorded_s, row.operation, row.size_bytes, row.ranks)),
    )


def _compared(key: Key, then: Tally, now: Tally) -> Row:
    def seconds(value_ns: int, one: Tally) -> float | None:
        return value_ns * 1e-9 if one.accounted_ns else None

    return Row(
        *key,
        recorded_calls=then.calls,
        replayed_calls=now.calls,
        recorded_bytes=then.size_bytes,
        replayed_bytes=now.size_bytes,
        recorded_s=then.total_ns * 1e-9,
        replayed_s=now.total_ns * 1e-9,
        recorded_waiting_s=seconds(then.waiting_ns, then),
        replayed_waiting_s=seconds(now.waiting_ns, now),
        recorded_transfer_s=seconds(then.accounted_ns - then.waiting_ns, then),
        replayed_transfer_s=seconds(now.accounted_ns - now.waiting_ns, now),
    )


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


def format_comparison(found: Comparison, stream: TextIO) -> str:
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
            table(_COLUMNS, [*clipped(rows, len(_COLUMNS)), cells], left=(0, 2)),
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
