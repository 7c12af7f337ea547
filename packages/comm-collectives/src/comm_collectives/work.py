"""Handles for what the collectives add after a backend has done its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from comm_utils.backend import Work
from comm_utils.errors import CommTimeoutError
from comm_utils.given import seconds_to_wait
from comm_utils.torch_support.handle import Handle
from comm_utils.watch.unfinished import still_under_way

__all__ = ["After", "Completed", "Received", "deliver", "run"]


def run(finish: Callable[[], None]) -> None:
    """Do local work that writes into the caller's tensors, as a library would: whatever kind of tensor they are."""
    with torch.inference_mode():  # outside of it, tensors made inside of it cannot be written
        finish()


class Completed(Handle):
    """The handle of something that was finished when the call returned."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        seconds_to_wait(timeout)
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None


class After(Handle):
    """Waits for other handles, then does local work once, in ``wait()``.

    All communication has been started before a handle like this exists, so ranks may wait for their handles in any
    order.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None, result: Any) -> None:
        self._works = works
        self._finish = finish
        self._result = result
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = seconds_to_wait(timeout)
        if limit_s is None:
            for work in self._works:
                work.wait()
        else:
            end = time.monotonic() + limit_s
            for work in self._works:
                try:
                    work.wait(max(0.0, end - time.monotonic()))
                except CommTimeoutError as error:
                    if work.exception() is not None:
                        raise
                    raise still_under_way(limit_s, *error.waits_for) from None
        with self._lock:
            if self._failure is not None:
                raise self._failure
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    run(finish)
                except BaseException as error:
                    self._failure = error  # what it has written is not the result, and it cannot begin again
                    raise
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        if self._failure is not None:
            return self._failure
        return next((error for work in self._works if (error := work.exception()) is not None), None)


class Received(After):
    """The handle of a message that is received."""

    def source_rank(self) -> int:
        """Return the group rank of the sender, once the message has arrived (torch: ``_source_rank``)."""
        return self._works[0].source_rank()


def deliver(
    works: Sequence[Work | None], finish: Callable[[], None] | None, result: Any, async_op: bool
) -> Work | None:
    """End a collective: a handle for ``async_op``, otherwise do ``finish`` now (the works have been waited for)."""
    if not async_op:
        if finish is not None:
            run(finish)
        return None
    return After([work for work in works if work is not None], finish, result)
