"""Handles that keep what ``comm_utils.backend.Work`` promises, over c10d's."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d as internals

from comm_utils.errors import CommError, CommTimeoutError
from comm_utils.flight_recorder.layout import LIMITED
from comm_utils.flight_recorder.recorder import WAITED_FOR
from comm_utils.given import SHORTEST_TIMEOUT, seconds_to_wait
from comm_utils.process_limits import start_thread
from comm_utils.torch_support.completing import COMPLETING
from comm_utils.torch_support.dropped import Dropped
from comm_utils.torch_support.failures import raised_by_handler
from comm_utils.torch_support.gloo_connections import keep_in_memory
from comm_utils.torch_support.gloo_workers import wait_until_idle
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.handle import Handle, tensors_of
from comm_utils.torch_support.recorded_calls import Note
from comm_utils.watch.unfinished import record_under_way

__all__ = ["Keep", "PolledWork", "TorchWork", "forget_abandoned", "have_ended", "left", "wait_and_check"]

# A worker thread of gloo that lets go of a tensor while the interpreter ends aborts the process; so the end waits for
# what is under way, for as long as nobody would mind.
_PATIENCE_AT_EXIT_S = 1.0
#: Works of collectives whose handle is held, and how they are waited for, by the identity of the handle.
_held: dict[int, tuple[Any, Any]] = {}
# In the error of c10d's handle after the time that the caller gave; failures of libraries have other texts.
_OVER = "Operation timed out!"
# How often a device is asked whether it has completed a work that is waited for with a limit.
_POLL_S = 0.0002

#: Turns a failure of c10d into one of ours and marks the group as broken.
Translate = Callable[[BaseException], BaseException]

#: Takes a work, the end of its time, its note, and how its failures are translated.
Keep = Callable[[Any, "float | None", "Note | None", Translate], None]


def left(end: float) -> timedelta:
    """Return how long it is until ``end``, as c10d accepts it."""
    return max(SHORTEST_TIMEOUT, timedelta(seconds=end - time.monotonic()))


def wait_and_check(state: GroupState, work: Any, end: float | None = None) -> None:
    """Wait for a work of NCCL and its like, whose wait ends without an error where the communicator was aborted."""
    if end is None:
        work.wait()
    else:
        work.wait(left(end))
    if state.broken is not None:
        state.check()


class TorchWork(Handle):
    """A c10d work handle. Attributes that are c10d's own (``get_future_result`` ...) are passed through.

    Args:
        end: when the time of the call is over, by the monotonic clock; None leaves that to the group's timeout.
        note: of the call in the flight recorder.
        own_wait: waits for ``work`` until ``end``, where the library may miss that it cannot go on.
    """

    __slots__ = (
        "__weakref__",
        "_end",
        "_failure",
        "_future",
        "_note",
        "_own_wait",
        "_result",
        "_translate",
        "_waited",
        "_work",
    )

    def __init__(
        self,
        work: Any,
        result: Any,
        translate: Translate,
        end: float | None = None,
        note: Note | None = None,
        own_wait: Callable[[Any, float | None], None] | None = None,
    ) -> None:
        self._work = work
        self._future = None
        self._own_wait = own_wait
        self._note = note
        self._result = result
        self._translate = translate
        self._end = end
        self._waited = False
        self._failure: BaseException | None = None
        _held[id(self)] = work, own_wait
        if _abandoned:
            _abandoned.look()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = None if timeout is None else seconds_to_wait(timeout)
        if self._failure is not None:
            raise self._failure
        note = self._note
        if note is not None:
            note.wait(LIMITED if limit_s is not None or self._end is not None else WAITED_FOR)
        if limit_s is not None:
            return self._wait_for(limit_s)
        try:
            if self._own_wait is None and self._end is None:  # as _wait_to_the_end() does, without another call
                self._work.wait()
            else:
                self._wait_to_the_end()
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            self._fail(error)
            raise cast("BaseException", self._failure) from error
        self._waited = True
        if note is not None:
            self._note = None
            note.end()
        return True

    def _fail(self, error: BaseException) -> None:
        self._failure = self._translate(error)
        note, self._note = self._note, None
        if note is not None:
            note.fail()

    def _ended(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            note.complete()

    def _wait_to_the_end(self) -> None:
        if self._own_wait is not None:
            self._own_wait(self._work, self._end)
        elif self._end is None:
            self._work.wait()
        else:
            self._work.wait(left(self._end))

    def _wait_for(self, timeout_s: float) -> bool:
        if timeout_s < 0.001 and not self._work.is_completed():
            raise self._still_under_way(timeout_s)  # c10d counts milliseconds, and takes none for no limit
        start = time.monotonic()
        if getattr(self._own_wait, "func", None) is wait_and_check:
            # c10d's own wait would abort the communicator at its limit, with the group.
            while not self._work.is_completed():
                if time.monotonic() - start >= timeout_s:
                    raise self._still_under_way(timeout_s)
                time.sleep(_POLL_S)
            return self.wait()
        try:
            self._work.wait(timedelta(milliseconds=max(1, math.ceil(timeout_s * 1000))))
            if self._own_wait is not None:  # raises where the library did not
                self._own_wait(self._work, time.monotonic() + timeout_s)
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            # c10d's own timeout breaks the group; the caller's, which is shorter, leaves the operation under way.
            is_over = _OVER in str(error)
            if not self._work.is_completed():
                if is_over or time.monotonic() - start >= timeout_s:
                    raise self._still_under_way(timeout_s) from None
            elif is_over:
                return self.wait()  # it has ended just after that, well or with its own error
            self._fail(error)
            raise cast("BaseException", self._failure) from error
        self._ended()
        return True

    def _still_under_way(self, timeout_s: float) -> CommTimeoutError:
        note = self._note
        return record_under_way(timeout_s, None if note is None else note.number)

    def is_completed(self) -> bool:
        if self._failure is not None:
            return True
        if not self._work.is_completed():
            return False
        if self._note is not None:
            try:
                self._work.wait()  # not is_success(), for which torch prints that it is deprecated
            except RuntimeError as error:
                if raised_by_handler(error):
                    raise
                return True  # wait() and exception() name it
            self._ended()
        return True

    def exception(self) -> BaseException | None:
        if self._failure is None and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError as error:
                if raised_by_handler(error):
                    raise
                self._fail(error)
            else:
                self._ended()
        return self._failure

    def source_rank(self) -> int:
        """Return the group rank of a message's sender, once it has arrived."""
        return int(self._work._source_rank())

    def get_future(self) -> Any:
        if any(not tensor.is_cpu for tensor in tensors_of(self._result)):
            return self.library_future()  # which knows the library's stream
        return super().get_future()

    def library_future(self) -> Any:
        """Return c10d's own future, which a thread of the library completes.

        Raises:
            RuntimeError: c10d has none for this operation.
        """
        return self._work.get_future()

    def _complete_later(self, complete: Callable[[], None]) -> None:
        # Not in the library's thread: what names a failure may take a while.
        self.library_future().add_done_callback(lambda _: COMPLETING.add(self._work.is_completed, complete))

    def __del__(self) -> None:
        _held.pop(id(self), None)
        # A program that took the future of c10d's handle does not need this one.
        if not getattr(self, "_waited", True) and (self._note is not None or not self._work.is_completed()):
            _abandoned.add((self._work, self._note, self._own_wait))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._work, name)


def forget_abandoned() -> None:
    """Let go of all operations that have ended and whose handles were dropped: they keep the store of their group."""
    _abandoned.look(len(_abandoned))


def _has_ended(one: tuple[Any, Note | None, Any]) -> bool:
    """Return whether a work is complete, and note its end."""
    # A query would invalidate a graph that this thread captures; without a driver, even to ask for one fails.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return False
    work, note, _ = one
    if not work.is_completed():
        return False
    if note is not None:
        try:
            work.wait()
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            note.fail()
        else:
            note.complete()
    return True


#: Works whose handle was dropped before their end, what the flight recorder has of them, and how they are waited for.
_abandoned = Dropped(_has_ended)


class PolledWork(TorchWork):
    """A point-to-point handle of gloo.

    gloo learns that a message has arrived only while someone waits for it, and a wait that runs into its timeout closes
    the connections of the whole group. So the first question that must not block starts a thread that waits; who only
    calls ``wait()`` never pays for one.

    Args:
        keep: takes what this handle holds when it is dropped before its end; None lets gloo cancel the message.
        check: raises where the group is broken, in which gloo completes no message any more.
    """

    __slots__ = ("_check", "_done", "_is_asked", "_is_taken", "_keep", "_lock", "_waiter")

    def __init__(
        self,
        work: Any,
        result: Any,
        translate: Translate,
        end: float | None,
        note: Note | None,
        own_wait: Callable[[Any, float | None], None],
        keep: Keep | None,
        check: Callable[[], None],
    ) -> None:
        super().__init__(work, result, translate, end, note, own_wait)
        _held.pop(id(self))  # this is no collective
        self._keep, self._check = keep, check
        self._waiter: threading.Thread | None = None
        #: Another thread waits while this message is taken.
        self._is_taken = self._is_asked = False
        self._lock = threading.Lock()
        self._done = threading.Event()

    def __del__(self) -> None:
        keep = getattr(self, "_keep", None)
        if not hasattr(self, "_done") or self._done.is_set() or self._failure is not None:
            return
        if keep is not None:
            keep(self._work, self._end, self._note, self._translate)
        elif self._note is not None:
            self._note.fail()

    def _watch(self) -> threading.Event:
        with self._lock:
            self._is_asked = True
            if self._waiter is None and not self._is_taken and not self._done.is_set():
                if self._note is not None:
                    self._note.wait(LIMITED)  # for the watch, to which a message in the background cannot be late
                waiter = threading.Thread(target=self._wait_in_thread, name="comm-p2p-wait", daemon=True)
                start_thread(waiter, "is_completed() or wait() with a timeout of a message", "call wait() without one")
                self._waiter = waiter
        return self._done

    def _wait_in_thread(self) -> None:
        try:
            self._wait_to_the_end()
            self._ended()
        except BaseException as error:
            self._fail(error)
        finally:
            self._done.set()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = None if timeout is None else seconds_to_wait(timeout)
        if self._done.is_set():
            pass  # gloo would wait for one more message
        elif limit_s is None and self._take():
            try:
                super().wait()
                self._done.set()
            except BaseException:
                self._interrupted()
                raise
        elif not self._waited_in_thread(limit_s):
            raise self._still_under_way(limit_s or 0.0)
        if self._failure is not None:
            raise self._failure
        return True

    def _interrupted(self) -> None:
        """Note what has become of the message after an error of the wait, of a signal if it is no failure."""
        if self._failure is None:
            try:
                self._check()
            except CommError as error:
                self._fail(error)
        if self._failure is not None:
            self._done.set()
        elif self._work.is_completed():  # a handler runs when gloo's wait has ended
            self._ended()
            self._done.set()
        else:
            self._is_taken = False  # or before it has begun
            if self._is_asked:
                self._watch()

    def _take(self) -> bool:
        """Return whether this thread alone waits in gloo, where each wait takes one message."""
        with self._lock:
            if self._waiter is not None or self._is_taken:
                return False
            self._is_taken = True
            return True

    def _waited_in_thread(self, limit_s: float | None) -> bool:
        note = self._note
        if note is not None:
            note.wait(WAITED_FOR if limit_s is None else LIMITED)
        return self._watch().wait(limit_s)

    def is_completed(self) -> bool:
        return self._done.is_set() or self._watch().wait(0.0005)

    def exception(self) -> BaseException | None:
        return self._failure if self.is_completed() else None

    def _complete_later(self, complete: Callable[[], None]) -> None:
        Handle._complete_later(self, complete)


def have_ended(patience_s: float, groups: Sequence[GroupState] | None = None) -> bool:
    """Return True where every asynchronous collective has ended within ``patience_s`` seconds.

    Args:
        groups: of gloo, whose collectives are asked about; None for those of all libraries and groups.
    """
    started = [*list(_held.values()), *((work, own_wait) for work, _, own_wait in list(_abandoned))]
    pending = [work for work, own_wait in started if groups is None or _waits_on(own_wait, groups)]
    end = time.monotonic() + patience_s
    while pending := [work for work in pending if not work.is_completed()]:
        if time.monotonic() >= end:
            return False
        time.sleep(0.001)
    return True


def _waits_on(own_wait: Any, groups: Sequence[GroupState]) -> bool:
    return isinstance(own_wait, partial) and any(own_wait.args[0] is one for one in groups)


@atexit.register
def _let_works_finish() -> None:
    were_pending = not have_ended(0.0)
    if were_pending and not have_ended(_PATIENCE_AT_EXIT_S):
        # Their destructors would wait for what does not end.
        for group in list(internals._world.pg_map):
            keep_in_memory(group)
    # They stay in memory: a thread of gloo that still holds one would be the last to let go of its tensors.
    for one in list(_abandoned):
        _has_ended(one)
    wait_until_idle(unseen_s=0.02 if were_pending or c10d.is_initialized() else 0.0)
