"""A handle that records when its operation ended."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.series import Series
from comm_utils.observability.traces.events import Operation
from comm_utils.observability.traces.file import TraceWriter
from comm_utils.torch_support.handle import Handle

__all__ = ["ObservedWork", "RecordedKind"]


class RecordedKind(NamedTuple):
    """Keep how calls of one kind are recorded: those of one operation, size, group and so on.

    Attributes:
        series: where their times go; None where they are not recorded.
        counter: of their sequence numbers, recorded or not.
        own: fields of :class:`Operation` that are other than the series'.
    """

    series: Series | None
    counter: Iterator[int]
    own: dict[str, Any] | None
    operation: Operation

    def add(self, sequence: int, begin_ns: int, end_ns: int) -> None:
        """Add a synchronous operation."""
        if self.series is not None:
            self.series.add_event(sequence, begin_ns, end_ns, None, self.own)


class ObservedWork(Handle):
    """Records once, with the time at which the operation ended.

    A backend's handle may know that time (``ended_ns()``), and it is recorded when somebody has waited or the handle is
    gone; otherwise the library calls back as the operation ends, or else it is when somebody has waited.

    Args:
        event: sequence, begin_ns, returned_ns; None where somebody else records the operation.
        instead: says at the end whether the record is another one than ``kind``, and which.
    """

    __slots__ = (
        "__weakref__",
        "_begin_ns",
        "_ended_ns",
        "_event",
        "_instead",
        "_kind",
        "_log",
        "_trace",
        "_waited",
        "_work",
    )

    def __init__(
        self,
        work: Any,
        log: CommsLogger,
        kind: RecordedKind,
        event: tuple[int, int, int] | None,
        instead: tuple[Callable[[], bool], RecordedKind] | None = None,
    ) -> None:
        self._work, self._instead = work, instead
        self._log, self._kind = log, kind
        self._event = event
        self._waited = False
        self._ended_ns: Callable[[], int | None] | None = getattr(work, "ended_ns", None)
        if event is None:
            return
        self._begin_ns = event[1]
        self._trace = log.opened()
        if log.recorder.released:
            log.recorder.settle()
        if self._ended_ns is None:
            _thread.has_state = True  # it calls back at once, in this thread, what is complete already
            with suppress(AttributeError, RuntimeError, NotImplementedError):  # a point-to-point handle has no future
                work.library_future().add_done_callback(self._called_back)

    def _called_back(self, future: Any) -> None:
        end_ns = perf_counter_ns()
        if not _thread.has_state:
            _keep_thread_state()
        try:
            future.value()
        except Exception:  # a time that ended with a failure says nothing about the operation
            if self._event is not None:
                self._event = None
                self._log.closed(self._trace)
        self._record(end_ns)

    def _record(self, end_ns: int | None) -> None:
        record = self._taken(end_ns)
        if record is not None:
            record()

    def _taken(self, end_ns: int | None) -> Callable[[], None] | None:
        """Return what records the operation, for the thread that comes first: the library's or the waiting one."""
        event, self._event = self._event, None
        if event is None:
            return None
        sequence, begin_ns, returned_ns = event
        end_ns = max(end_ns or perf_counter_ns(), begin_ns)
        kind = self._kind
        if self._instead is not None and self._instead[0]():
            kind = self._instead[1]
        return partial(_record, self._log, kind, self._trace, sequence, begin_ns, end_ns, returned_ns)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        begin_ns = perf_counter_ns()
        done: bool = self._work.wait(timeout)
        if self._event is not None:
            self._record(None if self._ended_ns is None else self._ended_ns())
        if self._log.writes and not self._waited and self._kind.series is not None:
            self._kind.series.add_wait(self._begin_ns, begin_ns, perf_counter_ns())
        self._waited = True
        return done

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done:
            self.exception()
        return done

    def exception(self) -> BaseException | None:
        failure: BaseException | None = self._work.exception()
        if failure is None and self._event is not None and self._work.is_completed():
            self._record(None if self._ended_ns is None else self._ended_ns())
        return failure

    def result(self) -> Any:
        self.wait()
        return self._work.result()

    def get_future(self) -> Any:
        future = self._work.get_future()
        if self._event is not None and self._ended_ns is None:  # who takes the future need not wait
            future.add_done_callback(self._called_back)
        return future

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        # Nobody waited, and nobody calls back.
        if getattr(self, "_event", None) is not None and self._ended_ns is not None:
            with suppress(Exception):
                end_ns = self._ended_ns()
                record = None if end_ns is None else self._taken(end_ns)
                if record is not None:
                    self._log.recorder.released.append(record)


def _record(
    log: CommsLogger,
    kind: RecordedKind,
    trace: TraceWriter | None,
    sequence: int,
    begin_ns: int,
    end_ns: int,
    returned_ns: int,
) -> None:
    assert kind.series is not None
    if log.writes:
        kind.series.add_event(sequence, begin_ns, end_ns, returned_ns, kind.own)
    else:
        kind.series.add(sequence, begin_ns, end_ns)
    log.closed(trace)
    if log.verbose:
        log.line(kind.operation, end_ns - begin_ns)


# Each costs memory, and a line in what faulthandler prints, which stops at a hundred.
_MOST_KEPT = 32
_kept = itertools.count()


class _Thread(threading.local):
    has_state = False


_thread = _Thread()


def _keep_thread_state() -> None:
    """Keep the state that Python has for this thread of a library, and would make and destroy for each callback.

    That takes longer than the callback, and the library's next operation waits for it. It is what
    ``PyGILState_Ensure`` gives to a caller that does not call ``PyGILState_Release``. It stays until the process ends,
    so it is done for the first threads alone.
    """
    _thread.has_state = True
    if sys.implementation.name == "cpython" and next(_kept) < _MOST_KEPT:
        ctypes.pythonapi.PyGILState_Ensure()
