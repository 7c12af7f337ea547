"""Handles of operations on oneCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from comm_backend_ccl import native
from comm_backend_ccl.native import Operation, Pending
from comm_utils.errors import ArgumentTypeError, CommTimeoutError

if TYPE_CHECKING:
    from comm_backend_ccl.communicator import Communicator

__all__ = ["LOOK_AROUND_S", "CclWork"]

# How often a waiting rank looks whether its peers live, and lets Python handle signals.
LOOK_AROUND_S = 0.05
# What a rank sent before it ended may still be on its way.
_GRACE_S = 0.3
_finishing = threading.RLock()


class CclWork:
    """See ``comm_utils.backend.Work``.

    Attributes:
        name: the operation, for messages.
        kept: tensors whose memory oneCCL uses until the end.
        finish: what is left to do when the data has arrived, once.
        outcome: what ``result()`` gives.
        end: when the time of the call is over, by the monotonic clock; None leaves that to the group's timeout.
        limit_s: how long that was.
    """

    __slots__ = ("_communicator", "_done", "_failure", "_handle", "end", "finish", "kept", "limit_s", "name", "outcome")

    def __init__(
        self, communicator: Communicator, handle: Pending | None, kept: tuple[Any, ...], operation: Operation
    ) -> None:
        self._communicator = communicator
        self._handle = handle
        self._done = handle is None
        self._failure: BaseException | None = None
        self.kept = kept
        self.name = operation.name.lower()
        self.finish: Callable[[], None] | None = None
        self.outcome: Any = None
        self.end: float | None = None
        self.limit_s = 0.0

    def limit(self, seconds: float) -> None:
        """Give the operation so much time from now on, instead of the group's."""
        self.end, self.limit_s = time.monotonic() + seconds, seconds

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        handle = self._handle
        if self._done or handle is None or self._failure is not None:
            return self._settled()
        limit_s = LOOK_AROUND_S if timeout is None else _seconds(timeout)
        try:
            done = native.wait(handle, min(limit_s, LOOK_AROUND_S))
        except RuntimeError as error:
            raise self._fail(self._communicator.failed(self.name, error)) from error
        if not done:
            self._wait_on(handle, None if timeout is None else limit_s)
        return self._arrived()

    def _wait_on(self, handle: Pending, limit_s: float | None) -> None:
        begin = time.monotonic()
        communicator = self._communicator
        own_end = None if limit_s is None else begin + limit_s - min(limit_s, LOOK_AROUND_S)
        of_call = self.end is not None
        end = begin - LOOK_AROUND_S + communicator.timeout_s if self.end is None else self.end
        while True:
            now = time.monotonic()
            if own_end is not None and now >= own_end:
                raise CommTimeoutError(
                    f"the operation did not finish within {limit_s:g} s; it is still under way and may be waited for "
                    "again"
                )
            if now >= end:
                after_s = self.limit_s if of_call else communicator.timeout_s
                raise self._fail(communicator.timed_out(self.name, after_s, of_call))
            sooner = min(end, own_end) if own_end is not None else end
            try:
                if native.wait(handle, max(0.0, min(LOOK_AROUND_S, sooner - now))):
                    return
                if communicator.peers.gone() and not native.wait(handle, _GRACE_S):
                    failure = communicator.lost(self.name)
                    assert failure is not None
                    raise self._fail(failure)
            except RuntimeError as error:
                if self._failure is not None:
                    raise
                raise self._fail(communicator.failed(self.name, error)) from error

    def _fail(self, failure: Exception) -> Exception:
        self._failure = failure
        return failure

    def _arrived(self) -> bool:
        self._done = True
        self.kept = ()
        if self.finish is not None:
            self._run_finish()
        return True

    def _settled(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self.finish is not None:
            self._run_finish()
        return True

    def _run_finish(self) -> None:
        with _finishing:  # another thread may wait for the same
            if self.finish is not None:
                self.finish()
                self.finish = None

    def is_completed(self) -> bool:
        if self._done or self._handle is None or self._failure is not None:
            return True
        try:
            return native.wait(self._handle, 0.0)
        except RuntimeError as error:
            self._fail(self._communicator.failed(self.name, error))
            return True

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._failure

    def result(self) -> Any:
        self.wait()
        return self.outcome

    def __del__(self) -> None:
        # Not before: another thread may be waiting with it.
        handle = getattr(self, "_handle", None)
        if handle is None:
            return
        if not self._done and not native.is_complete(handle):
            _abandoned.append(self.kept)  # oneCCL goes on reading and writing there
        native.release(handle)


#: Memory of operations whose handle was dropped before their end.
_abandoned: list[Any] = []


def _seconds(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"wait: timeout: got {timeout!r:.60}; expected seconds or a timedelta, or None")
    return float(timeout)
