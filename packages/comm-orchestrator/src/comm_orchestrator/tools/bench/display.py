"""Print the results of rank 0: the header and table that users of nccl-tests know, with a progress bar on stderr."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from comm_orchestrator.tools.bench import comparison, plot, results, system
from comm_orchestrator.tools.bench.libraries import Library
from comm_orchestrator.tools.bench.operations import IN_PLACE, OUT_OF_PLACE
from comm_orchestrator.tools.bench.options import AVERAGES, Options
from comm_orchestrator.tools.bench.plan import Plan, Row
from comm_orchestrator.tools.errors import print_nothing_more
from comm_orchestrator.tools.output import printable
from comm_utils.observability.bench_results import BenchFile, BenchResult, load
from comm_utils.sizes import format_size

__all__ = ["Printer", "Progress", "Table", "closing"]

# Terminals of fewer columns get a table with a line for each way.
_WIDE = 150
_ROW = "{:>12}  {:>12}  {:>13}  {:>6}  {:>6}"


class Table:
    """Lines of text.

    Args:
        libraries: names, backends and, of compressed ones, codecs; a column says which, where there are several.
        percentiles: columns for single calls.
        narrow: a line for each way instead of two halves, which fits 80 columns.
    """

    def __init__(self, libraries: Sequence[tuple[str, ...]], percentiles: bool, narrow: bool = False) -> None:
        self._narrow = narrow
        self._of_rows: tuple[str, ...] | None = None
        self._alone = len({name for name, *_ in libraries}) == len(libraries)
        self._compressed = any(one[2:] and one[2] for one in libraries)
        self._names = [_named(*one) for one in libraries]
        self._width = max(len(name) for name in self._names) if len(libraries) > 1 else 0
        columns: tuple[str, ...] = ("time", "algbw", "busbw", "#wrong")
        units: tuple[str, ...] = ("(us)", "(GB/s)", "(GB/s)", "")
        if percentiles:
            columns, units = (*columns, "min", "p50", "p99", "max"), (*units, *("(us)",) * 4)
        if self._compressed:
            columns, units = (*columns, "wire"), (*units, "(B)")
        self._percentiles = percentiles
        self._cells = len(columns)
        self._columns, self._units = columns, units

    def header(self) -> list[str]:
        """Return three lines: which half is which, the columns, their units."""
        if self._narrow:
            self._of_rows = None
            titles = [_NARROW_UNITS.get(name, name) for name in self._shown(self._columns)]
            return ["#" + self._narrow_line("size", "library", "way", titles)[1:]]
        empty = ("",) * 5
        halves = [title.center(9 * self._cells - 1) for title in ("out-of-place", "in-place")]
        lines = [
            self._line(empty, "", "  ".join(halves)),
            self._line(("size", "count", "type", "redop", "root"), "library", _cells(self._columns * 2)),
            self._line(("(B)", "(elements)", "", "", ""), "", _cells(self._units * 2)),
        ]
        return [("#" + line[1:]).rstrip() for line in lines]

    def rows(self, row: Row, results: Sequence[BenchResult]) -> list[str]:
        """Return a line for each library."""
        values = (row.size_bytes, row.count, row.dtype or "-", _SHORT.get(row.op, row.op or "none"), row.root)
        if self._narrow:
            return self._narrow_rows(row, results)
        lines = []
        for library in dict.fromkeys(map(_which, results)):
            by_way = {one.way: one for one in results if _which(one) == library}
            cells = [text for way in (OUT_OF_PLACE, IN_PLACE) for text in self._result(by_way.get(way))]
            lines.append(self._line(values, _named(*library), _cells(cells)).rstrip())
        return lines

    def _narrow_rows(self, row: Row, results: Sequence[BenchResult]) -> list[str]:
        lines = []
        kind = (row.dtype, _SHORT.get(row.op, row.op), "" if row.root < 0 else f"root {row.root}")
        if kind != self._of_rows:
            self._of_rows = kind
            lines += [f"# {' '.join(filter(None, kind))}"] if any(kind) else []
        for one in results:
            library = one.library if self._alone else _named(*_which(one))
            way = "in" if one.way == IN_PLACE else "out"
            cells = self._shown(self._result(one))
            lines.append(self._narrow_line(format_size(row.size_bytes), library, way, cells).rstrip())
        return lines

    def _shown(self, cells: Sequence[str]) -> list[str]:
        """Return the cells that fit: beside the times of single calls, one bandwidth."""
        return [*cells[:1], *cells[2:]] if self._percentiles else list(cells)

    def _narrow_line(self, size: str, library: str, way: str, cells: Sequence[str]) -> str:
        width = max(len(name.partition("/")[0] if self._alone else name) for name in self._names)
        which = f" {library:<{width}}" if self._width else ""
        return f"{size:>9}{which} {way:>3}" + "".join(f" {text:>7}" for text in cells)

    def _result(self, one: BenchResult | None) -> list[str]:
        if one is None:
            return ["N/A"] * self._cells
        wrong = "N/A" if one.wrong is None else str(one.wrong)
        cells = [number(one.time_us), number(one.algbw_gb_per_s), number(one.busbw_gb_per_s), wrong]
        times_us = (one.min_us, one.p50_us, one.p99_us, one.max_us) if self._percentiles else ()
        cells += [number(time) for time in times_us]
        return [*cells, _wire(one)] if self._compressed else cells

    def _line(self, values: Sequence[object], library: str, cells: str) -> str:
        which = f"  {library:<{self._width}}" if self._width else ""
        return _ROW.format(*values) + which + "  " + cells


_SHORT = {"product": "prod"}
_NARROW_UNITS = {"time": "time us", **{name: f"{name} us" for name in ("min", "p50", "p99", "max")}}
_NARROW_UNITS |= {"algbw": "algGB/s", "busbw": "busGB/s"}


def _which(one: BenchResult) -> tuple[str, str, str]:
    return one.library, one.backend, one.codec


def _named(library: str, backend: str, codec: str = "") -> str:
    """Return the name of a library; a codec without its options, which the files have."""
    return f"{library}/{backend} {codec.partition('(')[0]}".rstrip()


def _wire(one: BenchResult) -> str:
    """Return the bytes that a rank sent, in 7 places; "-" where nobody counts them."""
    text = str(one.wire_bytes) if one.codec else "-"
    return text if len(text) <= 7 else f"{one.wire_bytes / 2**20:.1f}M"


def _cells(texts: Sequence[str]) -> str:
    return "  ".join(f"{text:>7}" for text in texts)


def number(value: float) -> str:
    """Format in 7 places, with four significant digits, two of small values."""
    if 0 < value < 0.1:
        return f"{value:.2g}"
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= 7 and (decimals == 0 or value < 10 ** (5 - decimals)):
            return text
    return f"{value:.1e}" if len(f"{value:.0f}") > 7 else f"{value:.0f}"


def closing(results: Sequence[BenchResult]) -> list[str]:
    """Return the closing lines of nccl-tests, with a bandwidth for each library."""
    checked = [one.wrong for one in results if one.wrong is not None]
    wrong = sum(checked)
    state = "not checked" if not checked else f"{wrong} {'FAILED' if wrong else 'OK'}"
    lines = [f"# {'Out of bounds values':<20} : {state}"]
    libraries = list(dict.fromkeys(map(_which, results)))
    for library in libraries:
        speeds = [one.busbw_gb_per_s for one in results if _which(one) == library and not one.is_empty]
        if speeds:
            which = f" ({_named(*library)})" if len(libraries) > 1 else ""
            lines.append(f"# {'Avg bus bandwidth':<20} : {sum(speeds) / len(speeds):g} GB/s{which}")
    return lines


class Progress:
    """Rows done, out of ``total``; nothing at all where stderr is no terminal or rich is missing."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._task: Any = None
        if not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # It refreshes when a row is done, not from a thread, which would take time from what is measured.
        self._bar = Bar(
            *columns,
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def advance(self, row: Row) -> None:
        """``row`` is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{row.operation} {format_size(row.size_bytes)}")
            self._bar.refresh()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Out of the way of what is printed meanwhile."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        """Leave nothing on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Printer:
    """Prints the header at once, and each row when it is measured; nothing more where the reader has closed stdout."""

    def __init__(self, options: Options, ranks: list[dict[str, Any]], made: Plan, libraries: Sequence[Library]) -> None:
        self._options, self._ranks = options, ranks
        self._old = load(options.compare) if options.compare else None
        self._results: list[BenchResult] = []
        self._told = 0
        self._is_closed = False
        self._operation = ""
        columns = shutil.get_terminal_size().columns
        self._width = columns if sys.stdout.isatty() and columns < _WIDE else None
        named = [(one.name, one.backend, repr(one.compression) if one.compression else "") for one in libraries]
        self._table = Table(named, options.per_iteration, narrow=self._width is not None)
        self._several = len({row.operation for row in made.rows}) > 1
        self._progress = Progress(len(made.rows))
        self._print([*self._header(), *(f"# note: {one}" for one in made.notes)])

    @property
    def is_unread(self) -> bool:
        """Return whether nobody gets what would be measured from here on: stdout is closed, and no file is written."""
        options = self._options
        return self._is_closed and not (options.json or options.csv or options.plot or options.compare)

    def show(self, row: Row, results: Sequence[BenchResult], notes: Sequence[str]) -> None:
        """Print a row, and what the libraries turned out not to do."""
        self._results += results
        lines = [f"# note: {one}" for one in notes[self._told :]]
        self._told = len(notes)
        if row.operation != self._operation:
            self._operation = row.operation
            lines += ["#", f"# {row.operation}", *self._table.header()]
        self._print([*lines, *self._table.rows(row, results)])
        self._progress.advance(row)

    def conclude(self) -> int:
        """Print the end and write the files; the exit code."""
        self._progress.close()
        if not self._results:
            self._print(["# FAILED: nothing could be measured"])
            return 1
        self._print(closing(self._results))
        options = self._options
        made = BenchFile(
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            options.command,
            system.describe_system(self._ranks),
            options.to_json(),
            tuple(self._results),
        )
        if options.json:
            made.save(options.json)
        if options.csv:
            results.write_csv(self._results, options.csv)
        if options.plot:
            plot.plot(self._results, options.plot, self._title())
        failed = any(one.wrong for one in self._results)
        if self._old is not None:
            found = comparison.compare(self._old, made, options.tolerance)
            self._print(comparison.rendered(found, options.compare, options.tolerance))
            failed |= found.failed
        return int(failed)

    def _header(self) -> list[str]:
        options, facts = self._options, system.describe_system(self._ranks)
        step = f"{options.stepbytes}(bytes)" if options.stepbytes else f"{options.stepfactor}(factor)"
        ours = facts["packages"].get("comm-orchestrator", "?")
        lines = [
            f"# comm-orchestrator {ours}, torch {facts['torch']}, Python {facts['python']}",
            f"# {options.command}",
            f"# minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} "
            f"warmup iters: {options.warmup_iters} iters: {options.iters} rounds: {options.rounds} "
            f"validation: {options.check} average: {options.average} ({AVERAGES[options.average]} over ranks)",
            "#",
            "# Using devices",
        ]
        for rank, one in enumerate(self._ranks):
            where = f"Pid {one['pid']:>6} on {one['host']:>10} device {one['device']}  {one['name']}"
            lines.append(f"#  Rank {rank:>2} Group {one['group']:>2} {where}")
        return lines

    def _title(self) -> str:
        facts = system.describe_system(self._ranks)
        hosts = len(facts["hosts"])
        where = ", ".join(facts["devices"]) or facts["cpu"]
        return f"{len(self._ranks)} ranks on {hosts} host{'s' if hosts > 1 else ''}: {where}"

    def _print(self, lines: Sequence[str]) -> None:
        with self._progress.hidden():
            try:
                for line in lines:
                    line = printable(line, lines=True)
                    print(line if self._width is None else _wrapped(line, self._width))
                sys.stdout.flush()
            except BrokenPipeError:
                self._is_closed = True
                print_nothing_more()


def _wrapped(line: str, width: int) -> str:
    """Return a comment in lines of ``width`` columns; words, such as paths, stay whole, and so do rows of the table."""
    if not line.startswith("#") or len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)
