"""Handles of operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Set
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch

from comm_utils.errors import ArgumentTypeError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.layout import LIMITED
from comm_utils.flight_recorder.recorder import WAITED_FOR
from comm_utils.given import seconds_to_wait
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support.dropped import Dropped
from comm_utils.torch_support.failures import raised_by_handler
from comm_utils.torch_support.handle import Handle
from comm_utils.torch_support.recorded_calls import Note
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.unfinished import under_way

__all__ = ["ANY_SOURCE", "LOOK_AROUND_S", "STORE_GONE", "CclWork", "EngineHandle", "Operations", "seconds"]

#: The peer of a receive that takes a message of any rank.
ANY_SOURCE = -1
#: In the failure of a receive that depends on the store.
STORE_GONE = "the group's store has gone"
# How often a waiting rank looks whether its peers live, and lets Python handle signals.
LOOK_AROUND_S = 0.05
# What a rank sent before it ended may still be on its way.
_GRACE_S = 0.3
_finishing = ProcessLock(threading.RLock)


#: An operation under way: a ``oneccl_library.Handle``, or an ``Operation`` of shared memory.
EngineHandle: TypeAlias = Any


class Operations(Protocol):
    """The methods of a communicator that a handle calls; the communicator documents them."""

    broken: str | None
    timeout_s: float

    @property
    def was_destroyed(self) -> bool: ...

    def within(self, handle: EngineHandle, seconds: float) -> bool: ...

    def is_complete(self, handle: EngineHandle) -> bool: ...

    def release(self, handle: EngineHandle) -> None: ...

    def begin_wait(self, handle: EngineHandle, limited: bool) -> None: ...

    def ended_ns(self, handle: EngineHandle) -> int | None: ...

    def gone_for(self, handle: EngineHandle, peer: int | None) -> Set[int]: ...

    def source(self, handle: EngineHandle) -> int: ...

    def for_diagnosis(self) -> RingGroup: ...

    def trouble(self) -> Trouble | None: ...

    def in_trouble(self, call: str, trouble: Trouble) -> BaseException: ...

    def broken_error(self) -> BaseException: ...

    def destroyed_error(self, call: str) -> BaseException: ...

    def failed(self, call: str, error: BaseException, peer: int | None = None) -> BaseException: ...

    def lost(self, call: str, gone: Collection[int]) -> BaseException: ...

    def timed_out(self, call: str, limit_s: float, of_call: bool) -> BaseException: ...


class CclWork(Handle):
    """See ``comm_utils.backend.Work``.

    Attributes:
        name: the operation, for messages.
        kept: tensors whose memory the engine uses until the end.
        finish: what is left to do when the data has arrived, once.
        outcome: what ``result()`` gives.
        end: when the time of the call is over, by the monotonic clock; None leaves that to the group's timeout.
        limit_s: how long that was.
        peer: the only other rank that it needs; None needs all, ``ANY_SOURCE`` one of them.
        is_receive: it receives a message, whose sender ``source_rank()`` gives.
        note: of the call in the flight recorder, where the engine does not record it itself.
    """

    # What most operations never set costs nothing at their start.
    finish: Callable[[], None] | None = None
    end: float | None = None
    limit_s = 0.0
    peer: int | None = None
    is_receive = False
    note: Note | None = None
    _failure: BaseException | None = None
    _missed_at: float | None = None

    def __init__(
        self,
        communicator: Operations,
        handle: EngineHandle | None,
        kept: tuple[Any, ...],
        name: str,
        outcome: Any = None,
    ) -> None:
        self._communicator = communicator
        self._handle = handle
        self._begin = time.monotonic()
        self._done = handle is None
        self.kept = kept
        self.name = name
        self.outcome = outcome

    def limit(self, seconds: float) -> None:
        """Give the operation so much time from now on, instead of the group's."""
        self.end, self.limit_s = time.monotonic() + seconds, seconds

    def then(self, step: Callable[[], None] | None) -> CclWork:
        """Do ``step`` as well when the data has arrived."""
        first = self.finish
        if step is not None and first is not None:

            def both() -> None:
                first()
                step()

            self.finish = both
        elif step is not None:
            self.finish = step
        return self

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = None if timeout is None else seconds_to_wait(timeout)
        handle = self._handle
        if self._done or handle is None or self._failure is not None:
            return self._settled()
        if self.note is not None:
            self.note.wait(WAITED_FOR if limit_s is None and self.end is None else LIMITED)
        if not self._within(handle, LOOK_AROUND_S if limit_s is None else min(limit_s, LOOK_AROUND_S)):
            self._wait_on(handle, limit_s)
        self._done = True
        self.kept = ()
        self._note_end()
        return self._settled()

    def _note_end(self) -> None:
        if self.note is not None:
            self.note.end()
            self.note = None

    def _within(self, handle: EngineHandle, seconds: float) -> bool:
        try:
            return self._communicator.within(handle, seconds)
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise self._fail(self._communicator.failed(self.name, error, self.peer)) from error

    def _wait_on(self, handle: EngineHandle, limit_s: float | None) -> None:
        self._communicator.begin_wait(handle, limit_s is not None or self.end is not None)
        own_end = None if limit_s is None else time.monotonic() + limit_s - min(limit_s, LOOK_AROUND_S)
        while True:
            now = time.monotonic()
            if own_end is not None and now >= own_end:
                raise under_way(limit_s or 0.0, self.name, self._communicator.for_diagnosis())
            failure = self._hopeless(handle, now)
            if failure is not None:
                if self._within(handle, 0.0):
                    return
                raise self._fail(failure())
            sooner = min(self._latest(), now + LOOK_AROUND_S)
            if self._within(handle, max(0.0, (sooner if own_end is None else min(sooner, own_end)) - now)):
                return

    def _latest(self) -> float:
        return self._begin + self._communicator.timeout_s if self.end is None else self.end

    def _hopeless(self, handle: EngineHandle, now: float) -> Callable[[], BaseException] | None:
        """Return a function that creates the error, once waiting is pointless; else None."""
        communicator = self._communicator
        trouble = communicator.trouble()
        if trouble is not None:
            return lambda: communicator.in_trouble(self.name, trouble)
        if communicator.broken is not None:
            return communicator.broken_error
        if communicator.was_destroyed:
            return lambda: communicator.destroyed_error(self.name)
        if now >= self._latest():
            limit_s = communicator.timeout_s if self.end is None else self.limit_s
            return lambda: communicator.timed_out(self.name, limit_s, self.end is not None)
        peer = self.source_rank() if self.peer == ANY_SOURCE else self.peer
        gone = communicator.gone_for(handle, peer)
        if gone:
            self._missed_at = now if self._missed_at is None else self._missed_at
            if now >= self._missed_at + _GRACE_S:
                return lambda: communicator.lost(self.name, gone)
        return None

    def _fail(self, failure: BaseException) -> BaseException:
        self._failure = failure
        if self.note is not None:
            self.note.fail()
            self.note = None
        return failure

    def _settled(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self.finish is not None:
            with _finishing.lock, torch.inference_mode():  # another thread may wait for the same
                if self._failure is not None:
                    raise self._failure
                if self.finish is not None:
                    try:
                        self.finish()
                    except BaseException as error:
                        self._failure = error  # what it has written is not the result, and it cannot begin again
                        raise
                    self.finish = None
        return True

    def is_completed(self) -> bool:
        handle = self._handle
        if self._done or handle is None or self._failure is not None:
            return True
        try:
            if self._within(handle, 0.0):
                self._note_end()
                return True
            failure = self._hopeless(handle, time.monotonic())
            if failure is not None:
                self._fail(failure())
        except Exception as error:
            if raised_by_handler(error):
                raise
        return self._failure is not None

    def get_future(self) -> Any:
        handle = self._handle
        if self._future is None and not (self._done or handle is None or self._failure is not None):
            # The caller waits from now on, and ranks that have not come are missing.
            if self.note is not None:
                self.note.wait(WAITED_FOR if self.end is None else LIMITED)
            try:
                self._communicator.begin_wait(handle, self.end is not None)
            except RuntimeError as error:  # in a forked child
                raise self._fail(self._communicator.failed(self.name, error, self.peer)) from error
        return super().get_future()

    def ended_ns(self) -> int | None:
        """Return when the data had arrived, by ``time.perf_counter_ns``; None where that is not known."""
        if self._handle is None:  # complete before there was a handle; on Linux both clocks are one
            return round(self._begin * 1e9)
        return self._communicator.ended_ns(self._handle)

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._failure

    @property
    def _result(self) -> Any:
        return self.outcome

    def source_rank(self) -> int:
        """Return the group rank of a message's sender; -1 before it is known."""
        if self.peer is None or not self.is_receive:
            return super().source_rank()
        if self.peer == ANY_SOURCE and self._handle is not None:
            return self._communicator.source(self._handle)
        return self.peer

    def __del__(self) -> None:
        # Not before: another thread may be waiting with it.
        handle = getattr(self, "_handle", None)
        if handle is None:
            return
        communicator = self._communicator
        try:
            if self._done or communicator.is_complete(handle):
                self._note_end()
                communicator.release(handle)
            else:
                _abandoned.add((communicator, handle, self.kept, self.note))
        except Exception:  # in a forked child, or as the interpreter ends, modules are not what they were
            return


def _has_ended(one: tuple[Operations, EngineHandle, Any, Note | None]) -> bool:
    """Return whether an operation is complete, and note its end."""
    communicator, handle, _, note = one
    if not communicator.is_complete(handle):
        return False
    communicator.release(handle)
    if note is not None:
        note.end()
    return True


#: Operations whose handle was dropped before their end, with the memory in which they go on reading and writing, and
#: what the flight recorder has of them.
_abandoned = Dropped(_has_ended)


def seconds(call: str, timeout: float | timedelta) -> float:
    """Return a timeout in seconds."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"{call}: timeout: got {timeout!r:.60}; expected seconds or a timedelta, or None")
    return float(timeout)
