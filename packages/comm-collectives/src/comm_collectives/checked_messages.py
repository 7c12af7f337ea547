"""The handles of messages that are preceded by their descriptions."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from comm_utils.backend import Work
from comm_utils.given import seconds_to_wait
from comm_utils.process_limits import start_thread
from comm_utils.torch_support.handle import Handle
from comm_utils.watch.unfinished import still_under_way

__all__ = ["CheckedReceive", "CheckedSend", "Turn", "turn_of"]


@dataclass
class Turn:
    """The place of a receive among those of its group and tag.

    A description and its message have the same tag: a description that was awaited before the message of an earlier one
    would take that message. So a receive begins once those before it, from the same rank or from any, await theirs.

    Attributes:
        source: the group rank that it receives from; None for any.
        before: the receives that it waits for.
        is_over: it awaits its message, or has failed.
    """

    source: int | None
    before: list[Turn]
    is_over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait for the receives before, each of which ends at the timeout of its group."""
        for one in self.before:
            one.is_over.wait()
        self.before = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait, and end the turn with the block."""
        try:
            self.wait()
            yield
        finally:
            self.is_over.set()


_lock = threading.Lock()
_turns: WeakKeyDictionary[ProcessGroup, dict[int, list[Turn]]] = WeakKeyDictionary()


def turn_of(group: ProcessGroup, tag: int, source: int | None) -> Turn:
    """Return the turn of a receive that is about to begin."""
    with _lock:
        of_tags = _turns.setdefault(group, defaultdict(list))
        under_way = [one for one in of_tags[tag] if not one.is_over.is_set()]
        turn = Turn(source, [one for one in under_way if None in (source, one.source) or source == one.source])
        of_tags[tag] = [*under_way, turn]
        return turn


class CheckedSend(Handle):
    """See ``comm_utils.backend.Work``: a message and the description that was sent before it, both under way."""

    def __init__(self, description: Work, message: Work, result: Any) -> None:
        self._both, self._result = (description, message), result

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        end = _end(timeout)
        return all(one.wait(_left(end)) for one in self._both)

    def is_completed(self) -> bool:
        return all(one.is_completed() for one in self._both)

    def exception(self) -> BaseException | None:
        return next((found for one in self._both if (found := one.exception()) is not None), None)


class CheckedReceive(Handle):
    """See ``comm_utils.backend.Work``: receives a description, compares it, and then receives the message.

    A thread does so, as the sender may wait for the message to be received while this rank waits for something else:
    without checks, the receive would be under way by then.

    Args:
        call: the user's, for messages.
        turn: of this receive.
        begin: starts to receive the description; is called once the thread runs, as there may be no room for one.
        receive: compares the description, and starts to receive the message.
        result: what :meth:`result` returns.

    Raises:
        BackendUnavailableError: there can be no thread; nothing has begun.
    """

    def __init__(
        self, call: str, turn: Turn, begin: Callable[[], Work], receive: Callable[[Work], Work], result: Any
    ) -> None:
        self._turn, self._begin, self._receive, self._result = turn, begin, receive, result
        self._work: Work | None = None
        self._failure: BaseException | None = None
        self._compared = threading.Event()
        begun: SimpleQueue[Work | None] | None = None if turn.before else SimpleQueue()
        run = copy_context().run
        thread = threading.Thread(target=run, args=(self._compare, begun), name="comm-strict-receive", daemon=True)
        try:
            start_thread(thread, call, "receive with recv()")
        except BaseException:
            turn.is_over.set()
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
