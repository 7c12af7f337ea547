"""Handles: local work is done once, after all communication, whoever waits and however often."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from comm_collectives.work import After, Completed, deliver
from comm_utils import CommTimeoutError, PeerLostError, Work, threads
from comm_utils.torch_support.completing import COMPLETING


class Communication:
    """A work under way, until :meth:`end`; stands in for a backend's."""

    def __init__(self, ended: bool = False, error: BaseException | None = None) -> None:
        self._ended = threading.Event()
        self._error = error
        self.timeouts: list[Any] = []
        if ended:
            self.end()

    def end(self) -> None:
        self._ended.set()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        self.timeouts.append(timeout)
        assert not isinstance(timeout, timedelta)
        if not self._ended.wait(10 if timeout is None else timeout):
            raise CommTimeoutError("not yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error if self._ended.is_set() else None

    def result(self) -> Any:
        raise AssertionError("nobody asks for this")


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_handles_are_works() -> None:
    assert isinstance(Completed(), Work)
    assert isinstance(After([], None, None), Work)


def test_completed() -> None:
    handle = Completed("result")
    assert handle.wait() is True
    assert handle.wait(0) is True
    assert handle.is_completed()
    assert handle.exception() is None
    assert handle.result() == "result"


def test_finishes_once_after_everything_has_ended() -> None:
    works = [Communication(), Communication()]
    finish = Counter()
    handle = After(works, finish, "result")
    assert not handle.is_completed()
    works[0].end()
    assert not handle.is_completed()
    with pytest.raises(CommTimeoutError):
        handle.wait(0.01)
    assert finish.calls == 0
    works[1].end()
    assert handle.is_completed()
    assert finish.calls == 0, "local work belongs into wait()"
    assert handle.wait() is True
    assert finish.calls == 1
    assert handle.wait() is True
    assert handle.result() == "result"
    assert finish.calls == 1


def test_result_waits() -> None:
    finish = Counter()
    assert After([Communication(ended=True)], finish, "result").result() == "result"
    assert finish.calls == 1


def test_nothing_to_wait_for_and_nothing_to_do() -> None:
    handle = After([], None, [1])
    assert handle.is_completed()
    assert handle.exception() is None
    assert handle.wait(0) is True
    assert handle.result() == [1]


class Slow(Communication):
    """Takes a tenth of a second, once somebody waits."""

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        time.sleep(0.1)
        return super().wait(timeout)


@pytest.mark.parametrize("timeout", [0.3, timedelta(seconds=0.3)], ids=["seconds", "timedelta"])
def test_a_timeout_is_for_all_works_together(timeout: Any) -> None:
    first, second = works = [Slow(ended=True), Communication()]
    finish = Counter()
    start = time.monotonic()
    # What was left for the second work is nobody's business: the message is about the caller's own limit.
    with pytest.raises(CommTimeoutError, match=r"did not finish within 0\.3 s; it is still under way"):
        After(works, finish, None).wait(timeout)
    assert time.monotonic() - start >= 0.29
    assert finish.calls == 0
    assert 0 < first.timeouts[0] <= 0.3
    assert second.timeouts[0] <= 0.2


def test_after_a_timeout_it_can_be_waited_for_again() -> None:
    work = Communication()
    finish = Counter()
    handle = After([work], finish, "late")
    for _ in range(2):
        with pytest.raises(CommTimeoutError):
            handle.wait(0)
    work.end()
    assert handle.wait(0) is True
    assert (handle.result(), finish.calls) == ("late", 1)


def test_a_failure_is_raised_and_told_and_nothing_is_finished() -> None:
    lost = PeerLostError("rank 1 went away")
    works = [Communication(ended=True), Communication(ended=True, error=lost)]
    finish = Counter()
    handle = After(works, finish, None)
    assert handle.exception() is lost
    for ask in (handle.wait, handle.result):
        with pytest.raises(PeerLostError, match="rank 1 went away"):
            ask()
    assert finish.calls == 0
    assert After([Communication(error=lost)], None, None).exception() is None, "not known yet"


def test_the_groups_own_timeout_is_passed_on() -> None:
    over = CommTimeoutError("the group's time is over")
    handle = After([Communication(ended=True, error=over)], None, None)
    for timeout in (None, 5):
        with pytest.raises(CommTimeoutError, match="the group's time is over"):
            handle.wait(timeout)


def test_many_threads_wait_and_see_it_finished() -> None:
    work = Communication()
    done: list[bool] = []
    seen: list[bool] = []

    def finish() -> None:
        time.sleep(0.05)
        done.append(True)

    handle = After([work], finish, None)

    def wait() -> None:
        handle.wait()
        seen.append(bool(done))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    work.end()
    for thread in threads:
        thread.join()
    assert done == [True]
    assert seen == [True] * 8, "wait() returned before the result was there"


def test_deliver_a_synchronous_call() -> None:
    finish = Counter()
    assert deliver([None], finish, "result", async_op=False) is None
    assert finish.calls == 1
    assert deliver([None], None, "result", async_op=False) is None


def test_deliver_an_asynchronous_call() -> None:
    finish = Counter()
    work = Communication()
    handle = deliver([None, work, None], finish, "result", async_op=True)
    assert handle is not None
    assert not handle.is_completed()
    assert finish.calls == 0
    work.end()
    assert (handle.result(), finish.calls) == ("result", 1)


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_made_in_inference_mode_are_written(async_op: bool) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)

    def finish() -> None:
        tensor.fill_(3)

    handle = deliver([], finish, tensor, async_op)
    if handle is not None:
        handle.wait()
    assert tensor.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("result", [None, torch.ones(1), [torch.ones(1), torch.ones(2)], [[torch.ones(1)]]])
def test_a_future_gives_a_list_of_tensors(result: Any) -> None:
    communication = Communication()
    future = After([communication], None, result).get_future()
    chained = future.then(lambda done: done.value())
    assert not chained.done()
    communication.end()
    found = chained.wait()
    assert all(isinstance(one, torch.Tensor) for one in found)
    assert len(found) == (0 if result is None else len(result))


def test_a_future_fails_as_the_operation_does() -> None:
    work = After([Communication(ended=True, error=PeerLostError("gone"))], None, None)
    with pytest.raises(PeerLostError, match="gone"):
        work.get_future().wait()
    assert not work.is_success()


def test_a_future_that_lacked_a_thread_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    communication = Communication()
    work = After([communication], None, torch.ones(1))
    with monkeypatch.context() as lacking:
        lacking.setattr(COMPLETING, "_thread", None)
        lacking.setattr(threads, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            work.get_future()
    future = work.get_future()
    communication.end()
    deadline = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert future.value() == [torch.ones(1)]


def test_a_failing_callback_leaves_other_futures(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Communication(), Communication()
    failing = After([first], None, None).get_future().then(lambda _: 1 / 0)
    later = After([second], None, None).get_future()
    first.end()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failing.wait()
    second.end()
    assert later.wait() == []
