"""The handle of a message that is received after its description."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from comm_collectives.call_sites import from_here
from comm_collectives.receive_turns import Turn
from comm_utils.backend import Work
from comm_utils.given import seconds_to_wait
from comm_utils.process_limits import start_thread
from comm_utils.torch_support.handle import Handle
from comm_utils.watch.unfinished import still_under_way

__all__ = ["CheckedReceive"]


class CheckedReceive(Handle):
    """See ``comm_utils.backend.Work``: receives a description, compares it, and then receives the message.

    A thread does so, as the sender may wait for the message to be received while this rank waits for something else:
    without checks, the receive would be under way by then.

    Args:
        turn: of this receive.
        begin: starts to receive the description; is called once the thread runs, as there may be no room for one.
        receive: compares the description, and starts to receive the message.
        result: what :meth:`result` returns.

    Raises:
        BackendUnavailableError: there can be no thread; nothing has begun.
    """

    def __init__(self, turn: Turn, begin: Callable[[], Work], receive: Callable[[Work], Work], result: Any) -> None:
        self._turn, self._begin, self._receive, self._result = turn, begin, receive, result
        self._work: Work | None = None
        self._failure: BaseException | None = None
        self._compared = threading.Event()
        begun: SimpleQueue[Work | None] | None = None if turn.before else SimpleQueue()
        run, compare = copy_context().run, from_here(self._compare)
        thread = threading.Thread(target=run, args=(compare, begun), name="comm-strict-receive", daemon=True)
        try:
            start_thread(thread, turn.call, "receive with recv()")
        except BaseException:
            turn.end()
            raise
        if begun is not None:
            description = None
            try:
                description = begin()
            finally:
                begun.put(description)

    def _compare(self, begun: SimpleQueue[Work | None] | None) -> None:
        try:
            with self._turn.taken():
                description = self._begin() if begun is None else begun.get()
                if description is not None:
                    description.wait()
                    self._work = self._receive(description)
        except BaseException as error:
            self._failure = error
        finally:
            self._compared.set()

    def _started(self, end: float | None) -> Work:
        if not self._compared.wait(_left(end)):
            raise still_under_way(None)
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        return self._work

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        end = _end(timeout)
        return self._started(end).wait(_left(end))

    def is_completed(self) -> bool:
        return self._compared.is_set() and (self._work is None or self._work.is_completed())

    def exception(self) -> BaseException | None:
        return self._failure or (None if self._work is None else self._work.exception())

    def source_rank(self) -> int:
        """Return the group rank of the sender."""
        return self._started(None).source_rank()


def _end(timeout: float | timedelta | None) -> float | None:
    limit_s = None if timeout is None else seconds_to_wait(timeout)
    return None if limit_s is None else time.monotonic() + limit_s


def _left(end: float | None) -> float | None:
    """Return the seconds until ``end``; 0 once it has come, with which a wait asks."""
    return None if end is None else max(0.0, end - time.monotonic())
