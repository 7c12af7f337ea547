"""Handles of c10d over this backend's: their futures, and one limit for several operations."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from comm_backend_ccl.c10d_work import C10dWork
from comm_utils import threads
from comm_utils.errors import CommTimeoutError
from comm_utils.torch_support.completing import COMPLETING


class Operation:
    """Stand in for an operation under way; a wait with a limit takes all of it."""

    has_ended = False

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self.has_ended:
            assert timeout is not None
            time.sleep(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
            raise CommTimeoutError("not yet")
        return True

    def is_completed(self) -> bool:
        return self.has_ended


def test_a_future_that_lacked_a_thread_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    operation: Any = Operation()
    work = C10dWork(operation, [torch.ones(1)])
    with monkeypatch.context() as lacking:
        lacking.setattr(COMPLETING, "_thread", None)
        lacking.setattr(threads, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            work.get_future()
    future = work.get_future()
    operation.has_ended = True
    deadline = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert future.value() == [torch.ones(1)]
