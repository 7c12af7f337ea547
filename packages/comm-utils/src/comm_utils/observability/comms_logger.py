"""Counts and times of communication, by operation and message size, in bounded memory."""

from __future__ import annotations

import difflib
import os
import weakref
from collections.abc import Callable, Iterable
from time import monotonic, perf_counter_ns, sleep

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.observability.records import SERIES_KEPT, Records, Row, Window
from comm_utils.observability.sequence import SequenceCounters
from comm_utils.observability.series import Recorder, Series
from comm_utils.observability.traces.events import Operation
from comm_utils.observability.traces.file import TraceWriter
from comm_utils.sizes import bandwidth, format_size
from comm_utils.watch.watch import WATCH
from comm_utils.weak_collections import members_of

__all__ = ["EVENTS_KEPT", "SERIES_KEPT", "CommsLogger", "Row", "Window"]

#: How many of the last operations a log can tell one by one.
EVENTS_KEPT = 16384
# A device that takes longer may never come to an end.
_PATIENCE_S = 5.0


class CommsLogger:
    """Records operations; its settings are DeepSpeed's ``comms_logger`` keys.

    Args:
        verbose: log a line for every operation as it ends.
        prof_all: record every operation; otherwise only those in ``prof_ops``, names of recorded operations.
        debug: keep operations apart by the function of the user's program that called them.
        ranges: mark operations for profilers.

    Attributes:
        is_plain: all that is kept of an operation is its time.
        sequences: the counters of calls, recorded or not.
        recorder: where events wait to be counted.
        writes: whether a trace is being written.
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
        self.sequences = SequenceCounters()
        self.writes = False
        self._writer: TraceWriter | None = None
        self.recorder = Recorder(EVENTS_KEPT, self._stop_writing)
        self._records = Records(self.recorder)
        self.rows = self._records.rows
        self.totals = self._records.totals
        self.reset = self._records.reset
        self.choose(verbose, prof_all, prof_ops, debug, ranges)
        _loggers.add(self)

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
            ArgumentError: ``prof_ops`` are no names; nothing is changed.
        """
        self.prof_ops = self.prof_ops if prof_ops is None else _checked(prof_ops, self.prof_ops)
        self.verbose = self.verbose if verbose is None else verbose
        self.prof_all = self.prof_all if prof_all is None else prof_all
        self.debug = self.debug if debug is None else debug
        self.ranges = self.ranges if ranges is None else ranges
        self.is_plain = self.prof_all and not (self.verbose or self.debug or self.ranges)

    def wants(self, name: str) -> bool:
        """Return whether operations named ``name`` are to be recorded."""
        return self.prof_all or name in self.prof_ops

    def series(self, operation: Operation) -> Series:
        """Return the series that such operations are counted in, for as long as this logger lives.

        It may be of a coarser operation: beyond :data:`SERIES_KEPT`, new ones are taken together, with a WARNING.
        """
        return self._records.series(operation, self._define)

    def when_reading(self, before: Callable[[], bool]) -> None:
        """Have ``before`` called before anything is read: it records what has ended, and returns whether more will."""
        self._records.before_reading = before

    def window(self, name: str = "") -> Window:
        """Open a stretch of the program of which what is recorded can be read alone."""
        return self._records.window(name)

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

    def recent(self, most: int = EVENTS_KEPT) -> tuple[list[Operation], list[tuple[int, int, int, int]]]:
        """Return the last operations: kinds, and ``(number of the kind, sequence, begin_ns, end_ns)`` for each.

        The sequence is -1 where the kind takes different operations together: it has no group to count in.
        """
        self._records.settle()
        with self.recorder.lock:
            last, coarse = self.recorder.last(most), self._records.coarse
            if coarse:
                last = [(number, -1 if number in coarse else one, begin, end) for number, one, begin, end in last]
            return [series.operation for series in self._records], last

    def forget_events(self) -> None:
        """Forget the last operations, of which each is known by itself; their sums stay."""
        self._records.settle()
        with self.recorder.lock:
            self.recorder.forget()

    def start_writing(self, writer: TraceWriter) -> None:
        """Write each operation into a trace as it ends."""
        self._records.settle()
        with self.recorder.lock:
            self._write_to(writer)
            for series in self._records:
                self._define(series)

    def opened(self) -> TraceWriter | None:
        """Note that an operation is under way; its record takes what this returns to :meth:`closed`."""
        if not self.writes:
            return None
        with self.recorder.lock:
            if self._writer is not None:
                self._writer.under_way += 1
            return self._writer

    def closed(self, trace: TraceWriter | None) -> None:
        """Note that an operation that was under way is recorded, or has failed."""
        if trace is not None:
            with self.recorder.lock:
                trace.under_way -= 1

    def stop_writing(self) -> TraceWriter | None:
        """Write no more. Devices get a few seconds to complete what they were given.

        Returns:
            The writer, still open, or None where there is none or it has failed.
        """
        until = monotonic() + _PATIENCE_S
        while self._records.settle() and self.writes and monotonic() < until:
            sleep(0.001)
        with self.recorder.lock:
            return self._write_to(None)

    def _write_to(self, writer: TraceWriter | None) -> TraceWriter | None:
        """Replace the writer, and return the previous one."""
        before, self._writer, self.writes = self._writer, writer, writer is not None
        self.recorder.write_to(writer)
        return before

    def _define(self, series: Series) -> None:
        if self._writer is not None:
            try:
                self._writer.define(series.number, series.operation)
            except OSError as error:
                self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        with self.recorder.lock:
            writer = self._write_to(None)
        if writer is not None:
            logger.warning("the trace ends here: %s: %s; communication goes on", writer.path, error.strerror or error)
            writer.abandon()

    def after_fork(self) -> None:
        """In a child: leave the parent's trace alone, and the lock, which another thread may have held."""
        self.recorder.forked()
        writer = self._write_to(None)
        if writer is not None:
            writer.detach()


_loggers: weakref.WeakSet[CommsLogger] = weakref.WeakSet()


def _after_fork() -> None:
    for log in members_of(_loggers):
        log.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _settle_those_due() -> None:
    for log in members_of(_loggers):
        if log.writes:
            log.recorder.settle_if_due(perf_counter_ns())


WATCH.before_each_look(_settle_those_due)


def _checked(prof_ops: Iterable[str], before: frozenset[str]) -> frozenset[str]:
    chosen = list(prof_ops)
    for name in chosen:
        if not isinstance(name, str):
            raise ArgumentError(f"configure: prof_ops: got {name!r:.60}; expected names of operations")
        known = operations.recorded()
        if name not in known and name not in before:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning("prof_ops: %r is no operation: only calls with that log_name are recorded%s", name, hint)
    return frozenset(chosen)
