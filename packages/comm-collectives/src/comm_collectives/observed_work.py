"""A handle that records when its operation ended."""

from __future__ import annotations

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
    """Records once, with the time at which the operation ended.

    A backend's handle may know that time (``ended_ns()``); otherwise the library calls back, or else it is when
    somebody has waited.

    Args:
        timed: somebody else records; only who waits is recorded here.
    """

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
        self._ended_ns: Callable[[], int | None] = getattr(work, "ended_ns", _unknown)
        if self._ended_ns is _unknown and not timed:
            with suppress(AttributeError, RuntimeError, NotImplementedError):  # a point-to-point handle has no future
                work.get_future().add_done_callback(self._done)

    def _done(self, future: Any) -> None:
        try:
            future.value()
        except Exception:  # a time that ended with a failure says nothing about the operation
            self._event = None
        self._recorded()

    def _recorded(self) -> None:
        event, self._event = self._event, None
        if event is None:
            return
        sequence, begin_ns, returned_ns = event
        end_ns = max(self._ended_ns() or perf_counter_ns(), begin_ns)
        like = self._like
        assert like.series is not None
        like.series.add_event(sequence, begin_ns, end_ns, returned_ns, like.own)
        if self._log.verbose:
            self._log.line(like.operation, end_ns - begin_ns)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        begin_ns = perf_counter_ns()
        done: bool = self._work.wait(timeout)
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
        # Nobody waited, and there was no callback.
        if getattr(self, "_event", None) is not None and self._ended_ns is not _unknown:
            with suppress(Exception):
                if self._ended_ns() is not None:
                    self._recorded()


def _unknown() -> None:
    return None
