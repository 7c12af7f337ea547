"""Calls of several exchanges that were started and go on while the caller computes.

They take several exchanges, which other calls must not come between: so each group has a thread, which does one call
after the other, and a second group of the same ranks, which nobody else uses.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from comm_collectives.call_sites import from_here
from comm_collectives.failed_steps import breaking
from comm_utils import threads
from comm_utils.backend import Backend
from comm_utils.errors import BackendUnavailableError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.given import seconds_to_wait
from comm_utils.group_names import digest_of, name_of
from comm_utils.process_limits import lack_of_threads
from comm_utils.torch_support.handle import Handle
from comm_utils.torch_support.initialization import timeout_of
from comm_utils.torch_support.store_waits import making_of
from comm_utils.watch.unfinished import under_way
from comm_utils.watch.watch import WATCH
from comm_utils.weak_collections import members_of

__all__ = ["BackgroundWork", "forget", "start"]

_Call = tuple[Callable[[ProcessGroup], None], ProcessGroup, "BackgroundWork"]


class BackgroundWork(Handle):
    """The handle of a call that a thread does.

    Args:
        group: in which it communicates.
    """

    def __init__(self, name: str, group: RingGroup, result: Any) -> None:
        self._name, self._group, self._result = name, group, result
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Note the end of the call, from its thread."""
        self._error = error
        self._done.set()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = seconds_to_wait(timeout)
        if not self._done.wait(limit_s):
            raise under_way(limit_s or 0.0, self._name, self._group)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error if self._done.is_set() else None


class _Worker:
    """A thread and its group, which is made once the thread runs: a rank without it could not take part.

    The thread ends with the last reference to this object, once it has done its calls.

    Raises:
        RuntimeError: there can be no thread.
    """

    group: ProcessGroup
    described: RingGroup

    def __init__(self) -> None:
        self._prepared = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="comm-compression", daemon=True)
        threads.start(self._thread)
        _threads.add(self._thread)

    def start(self, call: Callable[[ProcessGroup], None], work: BackgroundWork) -> None:
        self._calls.put((call, self.group, work))

    def prepare(self, make: Callable[[ProcessGroup], object]) -> None:
        """Call the first ``make``, with no call under way: libraries make groups while nothing else communicates."""
        if self._prepared:
            return
        idle = BackgroundWork("", self.described, None)
        self.start(lambda _: None, idle)
        idle.wait()
        make(self.group)
        self._prepared = True

    def end(self) -> None:
        self._calls.put(None)

    def join(self, limit_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def __del__(self) -> None:
        self.end()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (one := calls.get()) is not None:
        call, group, work = one
        error: BaseException | None = None
        try:
            call(group)
        except BaseException as raised:
            error = raised
        work.finish(error)
        del one, call, group, work, error


_MAKING = "making the group for asynchronous calls"
# Of the end of a process with calls that are under way.
_PATIENCE_S = 10.0
# torch.distributed can end a group too, which must not be kept for its worker.
_workers: WeakKeyDictionary[ProcessGroup, _Worker] = WeakKeyDictionary()
# Those of workers, as long as they run.
_threads: WeakSet[threading.Thread] = WeakSet()


def start(
    name: str,
    backend: Backend,
    group: ProcessGroup | None,
    call: Callable[[ProcessGroup], None],
    result: Any,
    prepare: Callable[[ProcessGroup], object] | None = None,
) -> BackgroundWork:
    """Start ``call``, which gets the group to communicate in, after those of ``group`` that were started before.

    The first call of a group makes that group, on all of its ranks. A rank that cannot make it breaks ``group``, and
    all ranks of it learn the cause, as others may wait.

    Args:
        prepare: called with that group before its first call that has one, in the caller's thread, in which all ranks
            make groups in one order.
    """
    key = backend.get_world_group() if group is None else group
    worker = _workers.get(key)
    if worker is None:
        backend.check_group(group)
        worker = _workers[key] = _make_worker(name, backend.during(name), group)
    if prepare is not None:
        backend.check_group(worker.group)  # what prepares sends at once
        worker.prepare(prepare)
    work = BackgroundWork(name, worker.described, result)
    worker.start(from_here(call), work)
    return work


def _at_exit() -> None:
    """Wait for calls that are under way: a thread that Python ends inside of native code aborts the process."""
    end = time.monotonic() + _PATIENCE_S
    for worker in members_of(_workers.values()):
        worker.end()
    for thread in members_of(_threads):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_at_exit)


def _make_worker(call: str, backend: Backend, group: ProcessGroup | None) -> _Worker:
    """Return a thread for calls of ``group``, with a group of the same ranks."""
    parent = backend.get_world_group() if group is None else group
    ranks = backend.get_process_group_ranks(group)
    name, limit = f"comm-compression-{digest_of(parent, ranks)}", None if group is None else timeout_of(group)
    making = making_of(name)
    # Another rank may fail to make it, or be done and fail in a call.
    WATCH.has_steps(name_of(parent), (name, making))
    with breaking(_MAKING, backend, group, (), (making,)):
        worker = _begin_worker(f"{call}: rank {backend.get_rank()}")
        try:
            own = backend.create_group(ranks, name, limit, backend.get_backend(group))
        except BaseException:
            worker.end()
            raise
    trouble = WATCH.trouble(name)
    if trouble is not None:
        backend.mark_broken(own, trouble.short)
    worker.group, worker.described = own, RingGroup.of(own, backend.get_process_group_ranks(own))
    return worker


def _begin_worker(who: str) -> _Worker:
    try:
        return _Worker()
    except RuntimeError as error:
        raise BackendUnavailableError(f"{who}: {lack_of_threads(error) or error}") from error


def forget(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """End the thread of ``group``, which is destroyed; all of them where that is the world group.

    What is under way in ``group`` is waited for: other ranks wait for this one in it.

    Returns:
        The second group of ``group``, to be destroyed as well; None where it has none, or the world is destroyed.
    """
    if group is not None:
        worker = _workers.pop(group, None)
        if worker is None:
            return None
        worker.end()
        worker.join(_PATIENCE_S)
        return worker.group
    _workers.clear()
    return None
