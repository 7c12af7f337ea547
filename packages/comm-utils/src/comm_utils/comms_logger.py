"""Counts and times of communication, by operation and message size, in bounded memory."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TypeAlias

from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.series import EVENT, Histogram, Recorder, Series
from comm_utils.sizes import bandwidth, format_size
from comm_utils.traces.events import Operation
from comm_utils.traces.file import TraceWriter

__all__ = ["EVENTS_KEPT", "OPERATIONS", "SERIES_KEPT", "CommsLogger", "Row", "Window"]

#: How many of the last operations a log can tell one by one.
EVENTS_KEPT = 16384
#: How many different operations it tells apart before it rounds their sizes.
SERIES_KEPT = 4096

#: Every name under which an operation may be recorded.
OPERATIONS = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "inference_all_reduce",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )
)


@dataclass(frozen=True)
class Row:
    """What happened with one operation at one message size in one group; times in seconds.

    Attributes:
        name: what it was recorded as: ``log_name`` of the call, or else the operation.
        ranks: the global ranks of the group.
        caller: with ``debug``, the function that called.
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


class Window:
    """A stretch of a program, and what was recorded in it.

    Use as a context manager; windows may lie within each other.
    """

    def __init__(self, log: CommsLogger, name: str = "") -> None:
        self.name = name
        self._log = log
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
        if self._rows is None:
            self._rows = self._log.closed(self)
            self._ended_ns = perf_counter_ns()

    def rows(self) -> list[Row]:
        """What was recorded in it so far."""
        return self._log.rows(self) if self._rows is None else self._rows

    @property
    def elapsed_s(self) -> float:
        """How long it has been open, in seconds."""
        return ((self._ended_ns or perf_counter_ns()) - self._began_ns) * 1e-9

    @property
    def total_s(self) -> float:
        """The sum of the times of all operations, in seconds; asynchronous ones may have overlapped."""
        return sum(row.total_s for row in self.rows())


class CommsLogger:
    """Records operations; its settings are DeepSpeed's ``comms_logger`` keys.

    Args:
        verbose: log a line for every operation as it ends.
        prof_all: record every operation; otherwise only those in ``prof_ops``, names of :data:`OPERATIONS`.
        debug: keep operations apart by the function of the user's program that called them.
        ranges: mark operations for profilers.

    Attributes:
        is_plain: all that is kept of an operation is its time.
        before_reading: is called before anything is read; records what has ended meanwhile.
    """

    def __init__(
        self,
        verbose: bool = False,
        prof_all: bool = True,
        prof_ops: Iterable[str] = (),
        debug: bool = False,
        ranges: bool = False,
    ) -> None:
        self.verbose, self.prof_all, self.debug, self.ranges = False, True, False, False
        self.prof_ops: frozenset[str] = frozenset()
        self._series: dict[Operation, Series] = {}
        self._all: list[Series] = []
        self._counters: dict[Hashable, Iterator[int]] = {}
        self._first_sequence = 0
        self._windows: list[Window] = []
        self._writer: TraceWriter | None = None
        self._recorder = Recorder(EVENTS_KEPT, self._stop_writing)
        self.before_reading: Callable[[], None] = _nothing
        self.choose(verbose, prof_all, prof_ops, debug, ranges)

    def choose(
        self,
        verbose: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: Iterable[str] | None = None,
        debug: bool | None = None,
        ranges: bool | None = None,
    ) -> None:
        """Change settings; None leaves one as it is.

        A name in ``prof_ops`` that is no operation is kept, with a WARNING: DeepSpeed has others.

        Raises:
            ArgumentError: ``prof_ops`` are no names.
        """
        self.verbose = self.verbose if verbose is None else verbose
        self.prof_all = self.prof_all if prof_all is None else prof_all
        self.prof_ops = self.prof_ops if prof_ops is None else _checked(prof_ops)
        self.debug = self.debug if debug is None else debug
        self.ranges = self.ranges if ranges is None else ranges
        self.is_plain = self.prof_all and not (self.verbose or self.debug or self.ranges)

    def wants(self, operation: str) -> bool:
        """Whether ``operation`` is to be recorded."""
        return self.prof_all or operation in self.prof_ops

    def series(self, operation: Operation) -> Series:
        """Where such operations go, for as long as this logger lives.

        Beyond :data:`SERIES_KEPT` different ones, sizes are rounded up to a power of two, with a WARNING.
        """
        with self._recorder.lock:
            found = self._series.get(operation)
            if found is None:
                if len(self._all) == SERIES_KEPT:
                    logger.warning(
                        "comms logger: operations of more than %d sizes and kinds; from here on, new ones are recorded "
                        "under their size rounded up to a power of two",
                        SERIES_KEPT,
                    )
                if len(self._all) >= SERIES_KEPT:
                    rounded = 1 << max(operation.size_bytes - 1, 0).bit_length()
                    operation = replace(operation, size_bytes=rounded)
                    if operation in self._series:
                        return self._series[operation]
                found = self._series[operation] = Series(operation, len(self._all), self._recorder)
                self._all.append(found)
                if self._writer is not None:
                    self._define(found)
            return found

    def counter(self, key: Hashable) -> Iterator[int]:
        """The sequence numbers of what ``key`` names, until :meth:`count_from`."""
        with self._recorder.lock:
            return self._counters.setdefault(key, itertools.count(self._first_sequence))

    def highest_sequence(self) -> int:
        """No sequence number was higher; skips one in every counter, so :meth:`count_from` has to follow."""
        with self._recorder.lock:
            return max((next(counter) for counter in self._counters.values()), default=self._first_sequence)

    def count_from(self, first: int) -> None:
        """Let sequence numbers begin at ``first``, in counters that are then asked for."""
        with self._recorder.lock:
            self._counters.clear()
            self._first_sequence = first

    def line(self, operation: Operation, duration_ns: int) -> None:
        """Log a line where ``verbose``."""
        if self.verbose:
            rate = bandwidth(operation.operation, operation.size_bytes, duration_ns * 1e-9, operation.world_size)
            logger.info(
                "%s%s | size: %s | time: %.3f ms | algbw: %.2f GB/s | busbw: %.2f GB/s",
                operation.name,
                f" from {operation.caller}" if operation.caller else "",
                format_size(operation.size_bytes),
                duration_ns * 1e-6,
                rate.algbw_gb_per_s,
                rate.busbw_gb_per_s,
            )

    def rows(self, within: Window | None = None) -> list[Row]:
        """What was recorded, by operation, size, group and caller; of a window, or since the last :meth:`reset`."""
        self.before_reading()
        with self._recorder.lock:
            first = 0 if within is None else self._windows.index(within) + 1
            together: dict[_Key, Histogram] = {}
            for series in self._all:
                parts = [series, *(one.outside[series] for one in self._windows[first:] if series in one.outside)]
                for part in parts:
                    if part.calls:
                        together.setdefault(_key(series.operation), Histogram()).include(part)
            return [_row(key, together[key]) for key in sorted(together, key=lambda key: (*key[:3], len(key[3]), key))]

    def window(self, name: str = "") -> Window:
        """Open a stretch of the program of which what is recorded can be read alone."""
        self.before_reading()
        opened = Window(self, name)
        with self._recorder.lock:
            opened.outside = {series: series.taken() for series in self._all if series.calls}
            self._windows.append(opened)
        return opened

    def closed(self, window: Window) -> list[Row]:
        """End ``window``: what it has, which now counts for what is around it."""
        with self._recorder.lock:
            if window not in self._windows:  # reset() has closed it
                return []
            rows, place = self.rows(window), self._windows.index(window)
            above = self._windows[place + 1].outside if place + 1 < len(self._windows) else None
            for series, outside in window.outside.items():
                if above is None:
                    series.include(outside)
                else:
                    above.setdefault(series, Histogram()).include(outside)
            del self._windows[place]
            return rows

    def reset(self) -> None:
        """Forget everything recorded; what is open ends, and has nothing."""
        self.before_reading()
        with self._recorder.lock:
            for series in self._all:
                series.clear()
            self._windows.clear()
            self._recorder.events.clear()

    def recent(self) -> tuple[list[Operation], list[tuple[int, ...]]]:
        """The last operations, at most :data:`EVENTS_KEPT`: kinds, and ``(number of the kind, sequence, begin_ns,
        end_ns)`` for each."""
        self.before_reading()
        with self._recorder.lock:
            events = [EVENT.unpack(one) for one in self._recorder.events]
            return [series.operation for series in self._all], events

    @property
    def writes(self) -> bool:
        """Whether a trace is being written."""
        return self._writer is not None

    def start_writing(self, writer: TraceWriter) -> None:
        """Write each operation into a trace as it ends."""
        with self._recorder.lock:
            self._writer, self._recorder.write = writer, writer.write
            for series in self._all:
                self._define(series)

    def stop_writing(self) -> TraceWriter | None:
        """Write no more; returns the writer, still open, or None where there is none or it has failed."""
        self.before_reading()
        with self._recorder.lock:
            writer, self._writer, self._recorder.write = self._writer, None, None
            return writer

    def _define(self, series: Series) -> None:
        assert self._writer is not None
        try:
            self._writer.define(series.number, series.operation)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        writer = self.stop_writing()
        if writer is not None:
            logger.warning("the trace ends here: %s: %s; communication goes on", writer.path, error.strerror or error)
            writer.abandon()


def _nothing() -> None:
    pass


def _checked(prof_ops: Iterable[str]) -> frozenset[str]:
    chosen = list(prof_ops)
    for name in chosen:
        if not isinstance(name, str):
            raise ArgumentError(f"configure: prof_ops: got {name!r:.60}; expected names of operations")
        if name not in OPERATIONS:
            near = difflib.get_close_matches(name, OPERATIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning("prof_ops: %r is no operation: only calls with that log_name are recorded%s", name, hint)
    return frozenset(chosen)


_Key: TypeAlias = tuple[str, str, int, tuple[int, ...], str]


def _key(operation: Operation) -> _Key:
    return operation.name, operation.operation, operation.size_bytes, operation.ranks, operation.caller


def _row(key: _Key, times: Histogram) -> Row:
    name, operation, size, ranks, caller = key
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
    )
