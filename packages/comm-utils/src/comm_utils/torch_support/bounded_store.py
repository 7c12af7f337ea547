"""A store that fails within a limit where it does not answer."""

from __future__ import annotations

import atexit
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from comm_utils import threads
from comm_utils.errors import CommError, CommTimeoutError

__all__ = ["BoundedStore", "tcp_store_below"]

_T = TypeVar("_T")

# A store whose host is loaded answers within this, after the limit too: then it says who is missing.
_GRACE_S = 1.0
_THREAD = "comm-store-question"
# The end of the process waits no longer for questions whose connections it has ended.
_END_S = 2.0
# Those that are tried where the system does not list them.
_MOST_DESCRIPTORS = 4096
# The ports of stores that have not answered.
_silent_ports: set[int] = set()


class BoundedStore:
    """A store for one call, in which no question waits much longer than the call's limit.

    TCPStore waits for an answer without a limit, in C++: on a host that is cut off, and where the process that serves
    the store is stopped. So a thread asks each question. A thread that gets no answer is left behind; it keeps the
    store's connection, so later questions get none either, each within the limit of its own call.

    Args:
        who: the call and its rank.
        limit_s: of the call, from now on.
    """

    def __init__(self, store: Store, who: str, limit_s: float) -> None:
        self.unbounded = store
        self._who, self._end = who, time.monotonic() + limit_s
        self._is_silent = False
        self._other: BoundedStore | None = None

    def _ask(self, question: Callable[[], _T], look: Callable[[], None] | None = None) -> _T:
        if not self._is_silent:
            limit_s = max(0.0, self._end - time.monotonic()) + _GRACE_S
            try:
                outcome = threads.with_limit(lambda: (question(),), limit_s, _THREAD, look=look)
            except (RuntimeError, MemoryError):  # there can be no thread: the others are to hear of it all the same
                return question()
            if isinstance(outcome, BaseException):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback has this frame
            if outcome is not None:
                answer: _T = outcome[0]
                return answer
            self._is_silent = True
        found = tcp_store_below(self.unbounded)
        if found is not None:
            _silent_ports.add(found.port)
        address = "" if found is None else f" at {found.host}:{found.port}"
        raise CommTimeoutError(
            f"{self._who}: the store of the world{address} does not answer; this host may be cut off from it, or the "
            "process that holds the store, which is rank 0 unless a launcher holds it, may be stopped: check the "
            "network between the hosts and that process"
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Do as the store does."""
        # torch's annotation says str alone
        self._ask(lambda: self.unbounded.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Do as the store does."""
        return self._ask(lambda: self.unbounded.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, with one question where the store can answer it."""
        store: Any = self.unbounded
        if store.has_extended_api():
            return self._ask(lambda: list(store.multi_get(list(keys))))
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Do as the store does."""
        return self._ask(lambda: self.unbounded.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Do as the store does."""
        return self._ask(lambda: int(self.unbounded.add(key, amount)))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Do as the store does."""
        return self._ask(lambda: bytes(self.unbounded.compare_set(key, expected, wanted)))

    def delete_key(self, key: str) -> bool:
        """Do as the store does."""
        return self._ask(lambda: bool(self.unbounded.delete_key(key)))

    def with_own_connection(self, look: Callable[[], None]) -> BoundedStore:
        """Return a store with a connection of its own, for the same call; this one where there can be none.

        It is opened once. Stores of torch before 2.8 open none.

        Args:
            look: is called while it is opened, and raises where that is in vain: TCPStore tries again for the whole
                limit where the process that served the store has ended.

        Raises:
            CommTimeoutError: the store does not answer.
            CommError: that of ``look``; after its other errors, this store is returned.
        """
        store: Any = self.unbounded
        if self._other is None:
            try:
                other = self._ask(store.clone, look)
            except CommError:
                raise
            except (AttributeError, RuntimeError):
                return self
            self._other = BoundedStore(other, self._who, self._end - time.monotonic())
        return self._other


def tcp_store_below(store: Store) -> TCPStore | None:
    """Return the TCPStore that ``store`` puts prefixes on; None where it is another one."""
    below: Any = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    return below if isinstance(below, TCPStore) else None


def _descriptors() -> Sequence[str]:
    """Return the descriptors of this process, also those that are not open where ``/proc`` does not list them."""
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        return [str(number) for number in range(_MOST_DESCRIPTORS)]


def _end_questions() -> None:
    """End the questions that have no answer: one that came while Python ends would end the process with SIGABRT."""
    if not (_silent_ports and threads.left_behind()):
        return
    for descriptor in _descriptors():
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[1] in _silent_ports:
                    found.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _END_S
    for one in threads.left_behind():  # also those that wait for the store's connection
        one.join(max(0.0, end - time.monotonic()))


atexit.register(_end_questions)
