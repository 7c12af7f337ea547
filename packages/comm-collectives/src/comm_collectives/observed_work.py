"""A handle that records when its operation ended."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, NamedTuple

from comm_utils.comms_logger import CommsLogger
from comm_utils.series import Series
from comm_utils.traces.events import Operation

__all__ = ["Like", "ObservedWork"]


class Like(NamedTuple):
    """What is recorded of calls that are alike.

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


class ObservedWork:
    """Records once, with the time at which the operation ended, when somebody has waited or nobody can any more.

    A backend's handle may know that time (``ended_ns()``); otherwise the library calls back, or else it is when
    somebody has waited.

    Args:
        timed: somebody else records; only who waits is recorded here.
    """

    __slots__ = (
        "__weakref__",
        "_begin_ns",
        "_called_back_ns",
        "_ended_ns",
        "_event",
        "_like",
        "_log",
        "_waited",
        "_work",
    )

    def __init__(
        self,
        work: Any,
        log: CommsLogger,
        like: Like,
        sequence: int,
        begin_ns: int,
        returned_ns: int,
        timed: bool = False,
    ) -> None:
        self._work = work
        self._log, self._like = log, like
        self._event: tuple[int, int, int] | None = None if timed else (sequence, begin_ns, returned_ns)
        self._begin_ns = begin_ns
        self._waited = False
        self._called_back_ns: int | None = None
        self._ended_ns: Callable[[], int | None] | None = getattr(work, "ended_ns", None)
        if self._ended_ns is None and not timed:
            _here.is_known = True
            with suppress(AttributeError, RuntimeError, NotImplementedError):  # a point-to-point handle has no future
                work.get_future().add_done_callback(self._called_back)

    def _called_back(self, _: object) -> None:
        # In a thread of the library, which goes on after this, so there is no more here than has to be.
        self._called_back_ns = perf_counter_ns()
        if not _here.is_known:
            _stay_known()

    def _recorded(self) -> None:
        event, self._event = self._event, None
        if event is None:
            return
        sequence, begin_ns, returned_ns = event
        end_ns = self._called_back_ns if self._ended_ns is None else self._ended_ns()
        end_ns = max(end_ns or perf_counter_ns(), begin_ns)
        log, like = self._log, self._like
        assert like.series is not None
        if log.writes:
            like.series.add_event(sequence, begin_ns, end_ns, returned_ns, like.own)
        else:
            like.series.add(sequence, begin_ns, end_ns)
        if log.verbose:
            log.line(like.operation, end_ns - begin_ns)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        begin_ns = perf_counter_ns()
        done: bool = self._work.wait(timeout)
        if self._event is not None:
            self._recorded()
        if self._log.writes and not self._waited and self._like.series is not None:
            self._like.series.add_wait(self._begin_ns, begin_ns, perf_counter_ns())
        self._waited = True
        return done

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done and self._work.exception() is None:
            self._recorded()
        return done

    def result(self) -> Any:
        self.wait()
        return self._work.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        # Nobody waited.
        if getattr(self, "_event", None) is not None:
            with suppress(Exception):
                end_ns = self._called_back_ns if self._ended_ns is None else self._ended_ns()
                if end_ns is not None and self._work.exception() is None:
                    self._recorded()


class _Here(threading.local):
    is_known = False


_here = _Here()


def _stay_known() -> None:
    """Keep what Python has for this thread of a library, which otherwise is made for each callback and then destroyed.

    That takes longer than the callback, and the library's next operation waits for it. It is what
    ``PyGILState_Ensure`` gives to a caller that does not call ``PyGILState_Release``.
    """
    _here.is_known = True
    if sys.implementation.name == "cpython":
        ctypes.pythonapi.PyGILState_Ensure()
