"""Handles of c10d over this backend's: their futures, and one limit for several operations."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from comm_backend_ccl.c10d_work import C10dWork
from comm_utils import threads
from comm_utils.torch_support.completing import COMPLETING


class Operation:
    """Stand in for an operation under way."""

    has_ended = False

    def wait(self, timeout: float | None = None) -> bool:
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


def test_one_limit_is_for_all_operations_of_a_handle() -> None:
    limits: list[float] = []

    class Slow(Operation):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            limits.append(timeout)
            time.sleep(0.1)
            return True

    operations: list[Any] = [Slow(), Slow(), Slow()]
    assert C10dWork.of_all([C10dWork(one, []) for one in operations], []).wait(timedelta(seconds=30))
    assert limits[0] == 30
    assert limits[1] <= 29.9
    assert limits[2] <= 29.8
