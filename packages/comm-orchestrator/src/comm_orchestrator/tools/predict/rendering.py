"""Tables of models and predictions for people."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from comm_orchestrator.tools.fitted_table import FittedTable
from comm_orchestrator.tools.output import printable
from comm_orchestrator.tools.predict.job import Interval, Job, Row
from comm_utils.observability.cost_model import MARKS, NOT_MEASURED, Fit, FittedPoint, Key, Link, Model, Shape
from comm_utils.observability.cost_model.accuracy import Errors, errors_of
from comm_utils.sizes import format_size

__all__ = ["fits_table", "held_out_table", "job_tables", "show"]

_MOST_ROWS = 20
# Where nobody looks at it, lines are as long as they have to be.
_UNLIMITED = 10_000
_LEAST_WIDTH = 80


def show(stream: TextIO, parts: Iterable[RenderableType]) -> None:
    """Print ``parts`` as wide as the terminal, or as ``COLUMNS`` says where there is none."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else shutil.get_terminal_size().columns
    if not stream.isatty() and not columns.isdecimal():
        width = _UNLIMITED
    # A terminal that is narrower breaks lines; a table that is narrower loses digits.
    console = Console(file=stream, highlight=False, width=max(width, _LEAST_WIDTH))
    with console.capture() as captured:
        for one in parts:
            part = Text(printable(one.plain)) if isinstance(one, Text) else one
            console.print(part, soft_wrap=isinstance(part, Text) and width == _UNLIMITED)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
    # A terminal that cannot show a µ shows something else.
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _of(key: Key) -> tuple[str, str]:
    words = (f"{key.library}/{key.backend}", key.level, key.way.replace("_", " "), key.dtype, key.op, key.codec)
    return key.operation, " ".join(word for word in words if word)


def _ranks(fit: Fit) -> str:
    by_nodes: dict[int, set[int]] = {}
    for point in fit.points:
        by_nodes.setdefault(point.shape.nodes, set()).add(point.shape.ranks)
    some = {nodes: ", ".join(map(str, sorted(ranks))) for nodes, ranks in sorted(by_nodes.items())}
    return "; ".join(ranks if nodes == 1 else f"{ranks} on {nodes} hosts" for nodes, ranks in some.items())


def _shape(shape: Shape) -> str:
    return str(shape.ranks) if shape.nodes == 1 else f"{shape.ranks} on {shape.nodes} hosts"


def _errors(found: Errors | None) -> str:
    return "" if found is None else f"{100 * found.median:.1f} / {100 * found.p90:.1f}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def fits_table(model: Model) -> list[RenderableType]:
    """Return a row for each piece of each fit."""
    title = "a model: latency (alpha) and bandwidth (1/beta) fitted to measurements"
    columns = ("operation", "how", "ranks", "sizes", "algorithm", "alpha µs", "GB/s", "residual %", "left out %")
    table = FittedTable(columns, left=range(5), above=(0, 1, 4))
    assumed = alike = False
    for fit in model.fits:
        least, greatest = fit.sizes_bytes
        for number, piece in enumerate(fit.pieces):
            start = least if not number else piece.from_bytes
            stop = fit.pieces[number + 1].from_bytes if number + 1 < len(fit.pieces) else greatest
            inside = [
                (one.measured_us, one.fitted_us)
                for one in fit.points
                if (not number or one.size_bytes >= start) and (stop == greatest or one.size_bytes < stop)
            ]
            sign = " (assumed)" if piece.assumed else " (or others)" if piece.alternatives else ""
            assumed, alike = assumed or piece.assumed, alike or (bool(piece.alternatives) and not piece.assumed)
            beta = piece.chosen.beta_us_per_byte
            table.add_row(
                *(_of(fit.key) if not number else ("", "")),
                _ranks(fit) if not number else "",
                f"{format_size(start)} - {format_size(stop)}",
                piece.chosen.algorithm + sign,
                _number(piece.chosen.alpha_us),
                _number(1e-3 / beta) if beta > 0 else "-",
                _errors(errors_of(inside)),
                _errors(fit.between_sizes) if not number else "",
            )
    words = ["GB/s: 1/beta; %: relative errors, median / 90 %: of the fit, and of sizes left out in cross validation"]
    if assumed:
        words.append(
            "(assumed): groups of one size were measured, which fit every algorithm; add files of other --ranks"
        )
    if alike:
        words.append("(or others): other algorithms fit as well; the model file names them")
    return [Text(title), table, *(Text(line) for line in (*words, *model.notes))]


def held_out_table(held_out: Mapping[Key, list[FittedPoint]], what: str) -> list[RenderableType]:
    """Return a row for each fit, and one for all."""
    rule = "every other size left out" if what == "sizes" else "each number of ranks left out in turn"
    title = f"{rule}, {NOT_MEASURED}: error against what was measured"
    table = FittedTable(("operation", "how", "points", "error %, median / 90 %"), left=(0, 1), above=(0, 1))
    every: list[tuple[float, float]] = []
    for key, points in held_out.items():
        pairs = [(point.measured_us, point.fitted_us) for point in points]
        every += pairs
        table.add_row(*_of(key), str(len(pairs)), _errors(errors_of(pairs)))
    table.add_row("all", "", str(len(every)), _errors(errors_of(every)))
    return [Text(title), table]


def _seconds(found: Interval, unit: float = 1e3) -> tuple[str, str]:
    return _number(found.value_s * unit), f"{_number(found.low_s * unit)} - {_number(found.high_s * unit)}"


def job_tables(
    job: Job, network: Link | None, source: str, steps: int | None, notes: Iterable[str]
) -> list[RenderableType]:
    """Communication by operation, and the job as a whole."""
    placement = job.placement
    title = f"{placement}{f' over {network}' if network is not None else ''}: {NOT_MEASURED} ({source})"
    columns = ("operation", "size", "ranks", "algorithm", "calls", "recorded ms", "model ms", "interval ms", "unsure")
    table = FittedTable(columns, left=(0, 1, 2, 3, 8), above=(0, 3))
    for row in job.rows[:_MOST_ROWS]:
        table.add_row(*_row(row))
    if len(job.rows) > _MOST_ROWS:
        table.add_row("...", f"{len(job.rows) - _MOST_ROWS} more: --json lists all")
    recorded_s = sum(row.recorded_s for row in job.rows)
    calls = sum(row.calls for row in job.rows)
    table.add_row("communication", "", "", "", str(calls), _number(recorded_s * 1e3), *_seconds(job.communication), "")
    exposed = Interval(
        *(
            max(0.0, value - job.without_communication_s)
            for value in (job.wall.value_s, job.wall.low_s, job.wall.high_s)
        )
    )
    table.add_row("waited for (not overlapped)", "", "", "", "", "", *_seconds(exposed), "")
    table.add_row("whole job", "", "", "", "", _number(job.recorded_wall_s * 1e3), *_seconds(job.wall), "")
    if steps:
        each = Interval(job.wall.value_s / steps, job.wall.low_s / steps, job.wall.high_s / steps)
        table.add_row("a step", "", "", "", "", _number(job.recorded_wall_s / steps * 1e3), *_seconds(each), "")
    legend = [f"{mark}: {MARKS[mark]}" for mark in job.marks]
    return [Text(title), table, *(Text(line) for line in (*legend, *notes))]


def _row(row: Row) -> tuple[str, ...]:
    marks = "as recorded" if row.kept else ", ".join(sorted(row.estimate.marks))
    return (
        f"{row.operation} {row.codec.partition('(')[0]}".rstrip(),
        format_size(row.size_bytes),
        _shape(row.shape),
        row.estimate.algorithm,
        str(row.calls),
        _number(row.recorded_s * 1e3),
        *_seconds(row.predicted),
        marks,
    )
