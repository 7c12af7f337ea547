"""Draws a trace: over time, between ranks, or both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_orchestrator.tools.output import printable
from comm_orchestrator.tools.pictures import draw, library
from comm_orchestrator.tools.trace.charts import draw_timeline, draw_traffic, height_inches, side_inches
from comm_orchestrator.tools.trace.figures import check_format
from comm_orchestrator.tools.trace.files import waiting_of
from comm_orchestrator.tools.trace.intervals import span_ns
from comm_orchestrator.tools.trace.lanes import Lane, lanes
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import RankTrace
from comm_utils.observability.traces.traffic import Traffic, traffic
from comm_utils.sizes import format_size

__all__ = ["KINDS", "Wanted", "check", "plot", "ranks_of"]

KINDS = ("timeline", "traffic", "both")
_WIDTH_INCHES = 11.0
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MOST_RANKS = 1 << 20
_MOST_S = 1e9


@dataclass(frozen=True)
class Wanted:
    """The options of a plot.

    Attributes:
        kind: one of :data:`KINDS`.
        from_s, to_s: seconds since the first call; None for the first and the last. Traffic is of all the time.
        ranks: empty for all.
    """

    kind: str = "both"
    from_s: float | None = None
    to_s: float | None = None
    ranks: tuple[int, ...] = ()


def ranks_of(text: str) -> tuple[int, ...]:
    """``"0,2,4-6"`` as ranks.

    Raises:
        ArgumentError: it is no list of ranks.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not 0 < len(ranks) <= _MOST_RANKS:
            raise ArgumentError(f"--ranks: got {text!r:.200}; expected ranks such as 0,2,4-6, at most {_MOST_RANKS}")
        found.update(ranks)
    return tuple(sorted(found))


def check(path: Path, wanted: Wanted) -> None:
    """Refuse what no trace could be drawn as.

    Raises:
        ArgumentError: says what is wrong.
        BackendUnavailableError: matplotlib is not installed.
    """
    check_format(path)
    library("trace plot")
    if wanted.kind not in KINDS:
        raise ArgumentError(f"--kind: got {wanted.kind!r}; expected one of {', '.join(KINDS)}")
    for name, value in (("--from", wanted.from_s), ("--to", wanted.to_s)):
        if value is not None and not 0 <= value <= _MOST_S:
            raise ArgumentError(f"{name}: got {value:g}; expected seconds since the first call, {_MOST_S:g} at most")


def plot(traces: Sequence[RankTrace], path: Path, wanted: Wanted) -> None:
    """Draw ``traces``, which are aligned, to ``path``; both have passed :func:`check`.

    Raises:
        ArgumentError: what is wanted does not exist, or nothing can be written there.
    """
    W = traces[0].world_size
    ranks = wanted.ranks or tuple(range(W))
    outside = [rank for rank in ranks if rank >= W]
    if outside:
        raise ArgumentError(f"--ranks: got {outside[0]}; the trace has the ranks 0 to {W - 1}")
    if not any(trace.events for trace in traces):
        raise ArgumentError("the trace has no operations, so there is nothing to draw")
    backend = printable(", ".join(sorted({trace.backend for trace in traces if trace.backend})))
    rows: list[tuple[float, Any]] = []
    if wanted.kind != "traffic":
        found, begin, end = _lanes(traces, ranks, wanted)
        title = f"{W} rank{'s' if W != 1 else ''}{f' on {backend}' if backend else ''}"
        rows.append((height_inches(found), lambda figure: draw_timeline(figure, found, begin, end, title)))
    if wanted.kind != "timeline":
        moved, side = traffic(traces), side_inches(len(ranks))
        width = 1.3 * side if wanted.kind == "traffic" else _WIDTH_INCHES
        rows.append((side, lambda figure: draw_traffic(figure, moved, ranks, _total(moved), width)))
    else:
        width = _WIDTH_INCHES

    def fill(figure: Any) -> None:
        heights = [height for height, _ in rows]
        for (_, drawn), (part,) in zip(
            rows, figure.subfigures(len(rows), 1, False, height_ratios=heights), strict=True
        ):
            drawn(part)

    draw(path, (width, sum(height for height, _ in rows)), fill)


def _total(moved: Traffic) -> str:
    return f"{format_size(moved.total_bytes)} that ranks had to send to each other"


def _lanes(traces: Sequence[RankTrace], ranks: Sequence[int], wanted: Wanted) -> tuple[list[Lane], int, int]:
    """Return the lanes, with times since the first call, and from when until when."""
    first, last = span_ns(traces)
    begin = first + round((wanted.from_s or 0.0) * 1e9)
    end = last if wanted.to_s is None else first + round(wanted.to_s * 1e9)
    if begin >= last > first or begin > last:
        raise ArgumentError(
            f"--from: got {wanted.from_s:g}; the trace lasts {(last - first) * 1e-9:.6g} s from its first call"
        )
    if end <= begin and last > first:
        raise ArgumentError(f"--to: got {wanted.to_s:g}; expected more than --from, {wanted.from_s or 0:g}")
    end = max(end, begin + 1)
    found = lanes(traces, ranks, begin, end, waiting_of(traces))
    for lane in found:
        lane.bars = [bar.moved(-first) for bar in lane.bars]
    return found, begin - first, end - first
