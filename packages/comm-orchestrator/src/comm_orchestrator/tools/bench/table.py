"""The table that users of nccl-tests know."""

from __future__ import annotations

from collections.abc import Sequence

from comm_orchestrator.tools.bench.operations import IN_PLACE, OUT_OF_PLACE
from comm_orchestrator.tools.bench.plan import Row
from comm_utils.observability.bench_results import BenchResult

__all__ = ["Table", "closing"]

_ROW = "{:>12}  {:>12}  {:>13}  {:>6}  {:>6}"


class Table:
    """Lines of text.

    Args:
        libraries: names and backends; a column says which, where there are several.
        percentiles: columns for single calls.
    """

    def __init__(self, libraries: Sequence[tuple[str, str]], percentiles: bool) -> None:
        self._names = [_named(*one) for one in libraries]
        self._width = max(len(name) for name in self._names) if len(libraries) > 1 else 0
        columns: tuple[str, ...] = ("time", "algbw", "busbw", "#wrong")
        units: tuple[str, ...] = ("(us)", "(GB/s)", "(GB/s)", "")
        if percentiles:
            columns, units = (*columns, "min", "p50", "p99", "max"), (*units, *("(us)",) * 4)
        self._percentiles = percentiles
        self._cells = len(columns)
        self._columns, self._units = columns, units

    def header(self) -> list[str]:
        """Three lines: which half is which, the columns, their units."""
        empty = ("",) * 5
        halves = [title.center(9 * self._cells - 1) for title in ("out-of-place", "in-place")]
        lines = [
            self._line(empty, "", "  ".join(halves)),
            self._line(("size", "count", "type", "redop", "root"), "library", _cells(self._columns * 2)),
            self._line(("(B)", "(elements)", "", "", ""), "", _cells(self._units * 2)),
        ]
        return [("#" + line[1:]).rstrip() for line in lines]

    def rows(self, row: Row, results: Sequence[BenchResult]) -> list[str]:
        """A line for each library."""
        values = (row.size_bytes, row.count, row.dtype or "-", _SHORT.get(row.op, row.op or "none"), row.root)
        lines = []
        for library in dict.fromkeys((one.library, one.backend) for one in results):
            by_way = {one.way: one for one in results if (one.library, one.backend) == library}
            cells = [text for way in (OUT_OF_PLACE, IN_PLACE) for text in self._result(by_way.get(way))]
            lines.append(self._line(values, _named(*library), _cells(cells)).rstrip())
        return lines

    def _result(self, one: BenchResult | None) -> list[str]:
        if one is None:
            return ["N/A"] * self._cells
        wrong = "N/A" if one.wrong is None else str(one.wrong)
        cells = [number(one.time_us), number(one.algbw_gb_per_s), number(one.busbw_gb_per_s), wrong]
        times_us = (one.min_us, one.p50_us, one.p99_us, one.max_us) if self._percentiles else ()
        return cells + [number(time) for time in times_us]

    def _line(self, values: Sequence[object], library: str, cells: str) -> str:
        which = f"  {library:<{self._width}}" if self._width else ""
        return _ROW.format(*values) + which + "  " + cells


_SHORT = {"product": "prod"}


def _named(library: str, backend: str) -> str:
    return f"{library}/{backend}"


def _cells(texts: Sequence[str]) -> str:
    return "  ".join(f"{text:>7}" for text in texts)


def number(value: float) -> str:
    """In 7 places, with as many decimals as leave four figures."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= 7 and (decimals == 0 or value < 10 ** (5 - decimals)):
            return text
    return f"{value:.1e}" if len(f"{value:.0f}") > 7 else f"{value:.0f}"


def closing(results: Sequence[BenchResult]) -> list[str]:
    """What nccl-tests ends with; a bandwidth for each library."""
    checked = [one.wrong for one in results if one.wrong is not None]
    wrong = sum(checked)
    state = "not checked" if not checked else f"{wrong} {'FAILED' if wrong else 'OK'}"
    lines = [f"# {'Out of bounds values':<20} : {state}"]
    libraries = list(dict.fromkeys((one.library, one.backend) for one in results))
    for library in libraries:
        speeds = [
            one.busbw_gb_per_s
            for one in results
            if (one.library, one.backend) == library and one.operation != "barrier"
        ]
        if speeds:
            which = f" ({_named(*library)})" if len(libraries) > 1 else ""
            lines.append(f"# {'Avg bus bandwidth':<20} : {sum(speeds) / len(speeds):g} GB/s{which}")
    return lines
