"""Contents of a log: times by operation, size, group and caller, in total and in windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeAlias

from comm_utils.log import logger
from comm_utils.observability.series import Histogram, Recorder, Series
from comm_utils.observability.traces.events import Operation
from comm_utils.sizes import bandwidth

__all__ = ["SERIES_KEPT", "Records", "Row", "Window"]

#: Number of different operations that are counted separately; further ones are counted together.
SERIES_KEPT = 4096


@dataclass(frozen=True)
class Row:
    """The calls of one operation at one message size in one group; times in seconds.

    Attributes:
        name: what it was recorded as: ``log_name`` of the call, or else the operation.
        ranks: the global ranks of the group.
        caller: with ``debug``, the function that called.
        method: how it was done where that was not the library's own way: a codec, such as
            ``"int8(block_size=256)"``, or ``"hierarchical(2 hosts x 2 ranks)"``.
        wire_bytes: what this rank sent in a call; between hosts where it was hierarchical; 0 without a method.
    """

    name: str
    operation: str
    size_bytes: int
    world_size: int
    calls: int
    total_bytes: int
    total_s: float
    min_s: float
    median_s: float
    p95_s: float
    max_s: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    ranks: tuple[int, ...]
    caller: str = ""
    method: str = ""
    wire_bytes: int = 0


class Window:
    """A stretch of a program, and what was recorded in it.

    Use as a context manager; windows may lie within each other.
    """

    def __init__(self, records: Records, name: str) -> None:
        self.name = name
        self._records = records
        self._began_ns = perf_counter_ns()
        self._ended_ns: int | None = None
        self._rows: list[Row] | None = None
        # What each series held when this window was opened.
        self.outside: dict[Series, Histogram] = {}

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; what was recorded in it stays here, and counts for what is around it."""
        self._records.close(self)

    def end(self, rows: list[Row]) -> None:
        """Note that it has ended with ``rows``."""
        self._rows, self._ended_ns = rows, perf_counter_ns()

    def rows(self) -> list[Row]:
        """Return the rows recorded in it so far."""
        found = self._rows
        return self._records.rows(self) if found is None else found

    @property
    def elapsed_s(self) -> float:
        """Return how long it has been open, in seconds."""
        return ((self._ended_ns or perf_counter_ns()) - self._began_ns) * 1e-9

    @property
    def total_s(self) -> float:
        """The sum of the times of all operations, in seconds; asynchronous ones may have overlapped."""
        return sum(row.total_s for row in self.rows())


_Key: TypeAlias = tuple[str, str, int, tuple[int, ...], str, str, int]


class Records:
    """The series of a log, and the windows that are open.

    Attributes:
        coarse: numbers of the series that take different operations together.
        before_reading: is called before anything is read; records what has ended on devices meanwhile, and returns
            whether more is under way there.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._series: dict[Operation, Series] = {}
        self._all = recorder.series
        self._windows: list[Window] = []
        self.coarse: set[int] = set()
        self._forgotten: dict[_Key, Histogram] = {}
        self.before_reading: Callable[[], bool] = _nothing

    def series(self, operation: Operation, made: Callable[[Series], None]) -> Series:
        """Return the series that such operations are counted in.

        Beyond :data:`SERIES_KEPT`, new ones are counted together, with a WARNING.

        Args:
            made: takes a new series.
        """
        with self._recorder.lock:
            found = self._series.get(operation)
            is_coarse = found is None and len(self._all) >= SERIES_KEPT
            if is_coarse:
                operation = self._coarser(operation)
                found = self._series.get(operation)
            if found is None:
                found = self._series[operation] = Series(operation, self._recorder)
                if is_coarse:
                    self.coarse.add(found.number)
                made(found)
            return found

    def settle(self) -> bool:
        """Count everything that has ended. Return whether operations are under way on devices."""
        more = self.before_reading()
        self._recorder.settle()
        return more

    def _coarser(self, operation: Operation) -> Operation:
        if not self.coarse:
            logger.warning(
                "comms logger: more than %d different operations; from here on, new ones are recorded under their size "
                "rounded up to a power of two, whatever their names, groups and tags",
                SERIES_KEPT,
            )
        size = operation.size_bytes
        rounded = 1 << (size - 1).bit_length() if size else 0
        ranks = tuple(range(operation.world_size))
        kind = operation.operation
        return Operation(kind, kind, rounded, ranks, asynchronous=operation.asynchronous, on_device=operation.on_device)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._all)

    def rows(self, within: Window | None = None) -> list[Row]:
        """Return the rows of a window, or of the time since the last :meth:`reset`."""
        self.settle()
        with self._recorder.lock:
            if within is not None and within not in self._windows:
                return within.rows()  # it has been ended meanwhile
            together = self._together(0 if within is None else self._windows.index(within) + 1)
            return [_row(key, together[key]) for key in sorted(together, key=_order)]

    def _together(self, first: int) -> dict[_Key, Histogram]:
        """By what rows differ in: what series hold, and what they held when windows from ``first`` on were opened."""
        found: dict[_Key, Histogram] = {}
        for series in self._all:
            parts = [series, *(one.outside[series] for one in self._windows[first:] if series in one.outside)]
            for part in parts:
                if part.calls:
                    found.setdefault(_key(series.operation), Histogram()).include(part)
        return found

    def totals(self) -> dict[_Key, tuple[int, int]]:
        """Return calls and nanoseconds by what rows differ in, with all that was ever forgotten."""
        self.settle()
        with self._recorder.lock:
            found = self._together(0)
            for key, before in self._forgotten.items():
                found.setdefault(key, Histogram()).include(before)
            return {key: (times.calls, times.total_ns) for key, times in found.items()}

    def window(self, name: str) -> Window:
        """Open a stretch of the program of which what is recorded can be read alone."""
        self.settle()
        opened = Window(self, name)
        with self._recorder.lock:
            opened.outside = {series: series.taken() for series in self._all if series.calls}
            self._windows.append(opened)
        return opened

    def close(self, window: Window) -> None:
        """End ``window``: what it has now counts for what is around it."""
        with self._recorder.lock:
            if window not in self._windows:
                return
            window.end(self.rows(window))
            place = self._windows.index(window)
            above = self._windows[place + 1].outside if place + 1 < len(self._windows) else None
            for series, outside in window.outside.items():
                if above is None:
                    series.include(outside)
                else:
                    above.setdefault(series, Histogram()).include(outside)
            del self._windows[place]

    def reset(self) -> None:
        """Forget everything recorded; what is open ends, and has nothing."""
        self.settle()
        with self._recorder.lock:
            for key, times in self._together(0).items():
                self._forgotten.setdefault(key, Histogram()).include(times)
            for series in self._all:
                series.clear()
            for window in self._windows:
                window.end([])
            self._windows.clear()
            self._recorder.forget()


def _nothing() -> bool:
    return False


def _key(operation: Operation) -> _Key:
    compressed = operation.method, operation.wire_bytes
    return (operation.name, operation.operation, operation.size_bytes, operation.ranks, operation.caller, *compressed)


def _order(key: _Key) -> tuple[object, ...]:
    return (*key[:3], len(key[3]), key)


def _row(key: _Key, times: Histogram) -> Row:
    name, operation, size, ranks, caller, method, wire_bytes = key
    median_s = times.quantile_ns(0.5) * 1e-9
    rate = bandwidth(operation, size, median_s, len(ranks))
    return Row(
        name=name,
        operation=operation,
        size_bytes=size,
        world_size=len(ranks),
        calls=times.calls,
        total_bytes=size * times.calls,
        total_s=times.total_ns * 1e-9,
        min_s=times.min_ns * 1e-9,
        median_s=median_s,
        p95_s=times.quantile_ns(0.95) * 1e-9,
        max_s=times.max_ns * 1e-9,
        algbw_gb_per_s=rate.algbw_gb_per_s,
        busbw_gb_per_s=rate.busbw_gb_per_s,
        ranks=ranks,
        caller=caller,
        method=method,
        wire_bytes=wire_bytes,
    )
