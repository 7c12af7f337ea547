"""The thread that completes the futures of handles."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from comm_utils import threads
from comm_utils.log import logger

__all__ = ["COMPLETING", "Completing"]

# Between two looks at operations under way: short after something has happened, longer the longer nothing does.
_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 1e-3


class _Pending(NamedTuple):
    is_completed: Callable[[], bool]
    complete: Callable[[], None]


class Completing:
    """One thread for all operations whose future somebody has asked for.

    It asks each whether it is complete, and waits for none: what ends one may wait for the future of another.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        # Not a queue.SimpleQueue: a get() with a short timeout may wait without an end there (CPython 3.10 to 3.12).
        self._new: deque[_Pending] = deque()
        self._woken = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, is_completed: Callable[[], bool], complete: Callable[[], None]) -> None:
        """Call ``complete`` in the thread as soon as ``is_completed`` says so."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="comm-futures", daemon=True)
                threads.start(thread)
                self._thread = thread
                atexit.register(self.stop)
        self._new.append(_Pending(is_completed, complete))
        self._woken.set()

    def is_this_thread(self) -> bool:
        """Return whether the caller is the thread that completes futures."""
        return threading.current_thread() is self._thread

    def leave_to_parent(self) -> None:
        """Forget in a forked child what its parent waits for; the child has no thread yet."""
        self._begin()

    def stop(self) -> None:
        """End the thread; what is under way is not completed."""
        self._is_stopped = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        pending: list[_Pending] = []
        nap_s = _SHORTEST_NAP_S
        while True:
            if self._woken.wait(nap_s if pending else None):
                self._woken.clear()  # before what was added is taken
                nap_s = _SHORTEST_NAP_S
            else:
                nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
            if self._is_stopped:
                return
            while self._new:
                pending.append(self._new.popleft())
            still = [one for one in pending if not _has_completed(one)]
            if len(still) < len(pending):
                nap_s = _SHORTEST_NAP_S
            pending = still
            del still


def _has_completed(one: _Pending) -> bool:
    try:
        if not one.is_completed():
            return False
    except Exception:  # complete() sets the same error
        logger.debug("an operation cannot say whether it is complete", exc_info=True)
    try:
        one.complete()
    except Exception:
        logger.exception("a callback of an operation's future failed")
    return True


COMPLETING = Completing()
os.register_at_fork(after_in_child=COMPLETING.leave_to_parent)
