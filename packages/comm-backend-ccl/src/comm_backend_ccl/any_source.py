"""Receives from any source on oneCCL, which cannot say whose message is next: senders count theirs in the store.

Each send without a tag writes how many there were to that rank, and waits for no answer. A receive from any source
looks for a rank that has sent more than was received from it, and is then oneCCL's receive from that rank. The messages
themselves are oneCCL's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed import FileStore, PrefixStore, Store

from comm_backend_ccl.work import ANY_SOURCE, STORE_GONE, EngineHandle
from comm_utils.errors import ArgumentError
from comm_utils.torch_support.failures import raised_by_handler

__all__ = ["AnySource", "QueuedReceive", "match_all"]

_DESTROYED = "the group was destroyed"
_NAPS_S = 0.0002, 0.005
# So many messages are never sent.
_COUNT_DIGITS = 19

#: Those with receives that no message has been found for.
_waiting: set[AnySource] = set()


class QueuedReceive:
    """A receive that has to wait for its turn.

    Attributes:
        source: the group rank that is named, or ``ANY_SOURCE``; the sender's in the end.
        handle: of oneCCL's receive, once the sender is known.
        failure: why that could not be started.
    """

    def __init__(self, tensor: torch.Tensor, source: int) -> None:
        self.tensor, self.source = tensor, source
        self.handle: EngineHandle | None = None
        self.failure: str | None = None


class AnySource:
    """The messages without a tag of one rank of a group.

    Args:
        store: the group's.
        start: starts oneCCL's receive into a tensor from a rank.
    """

    def __init__(self, store: Store, rank: int, size: int, start: Callable[[torch.Tensor, int], EngineHandle]) -> None:
        self._store, self._rank, self._size, self._start = store, rank, size, start
        self._sent = [0] * size
        self._announced = [0] * size
        self._taken = [0] * size
        self._queue: deque[QueuedReceive] = deque()
        self._first = 0  # whose messages are looked for first, so that a rank that sends much hides no other
        self._lock = threading.Lock()
        # A file would grow with each message.
        self._counts = not isinstance(_below(store), FileStore)

    def announce(self, to: int) -> None:
        """Say that a message follows."""
        if not self._counts:
            return
        with self._lock:
            try:
                self._store.set(f"sent/{self._rank}/{to}", str(self._sent[to] + 1))
                self._sent[to] += 1  # not where a signal handler raises: that message is not sent
            except RuntimeError as error:
                if raised_by_handler(error):
                    raise
                self._counts = False  # its host has gone, which is no reason not to send

    def take(self, source: int) -> bool:
        """Note a receive from a named source; return False where it has to wait for those that were made before."""
        with self._lock:
            if self._queue:
                return False
            self._taken[source] += 1
            return True

    def receive(self, tensor: torch.Tensor, source: int) -> QueuedReceive:
        """Queue a receive.

        Raises:
            ArgumentError: it is from any source, and cannot be served.
        """
        if source == ANY_SOURCE and not self._can_look():
            raise ArgumentError(
                "recv: src: missing; on oneCCL, a group whose store is a file or has gone cannot receive from any "
                "source without a tag; name the sender, or give both sides a tag other than 0"
            )
        if source == ANY_SOURCE and not tensor.numel():
            raise ArgumentError(
                "recv: src: missing; on oneCCL, a tensor of no elements is not sent without a tag; name the sender, or "
                "give both sides a tag other than 0"
            )
        queued = QueuedReceive(tensor, source)
        with self._lock:
            self._queue.append(queued)
            _waiting.add(self)
        return queued

    def within(self, receive: QueuedReceive, seconds: float, wait: Callable[[EngineHandle, float], bool]) -> bool:
        """Return whether a receive was complete within so long; ``wait`` is oneCCL's.

        Raises:
            RuntimeError: it failed, or the store has gone.
        """
        end, nap_s = time.monotonic() + seconds, _NAPS_S[0]
        while True:
            match_all()
            if receive.failure is not None:
                raise RuntimeError(receive.failure)
            left_s = max(0.0, end - time.monotonic())
            if receive.handle is not None:
                return wait(receive.handle, left_s)
            if not left_s:
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 1.5, _NAPS_S[1])

    def match(self) -> None:
        """Start the receives whose sender is known, in the order in which they were made."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is about it
        try:
            while self._queue:
                receive = self._queue[0]
                try:
                    source = self._next() if receive.source == ANY_SOURCE else receive.source
                except RuntimeError as error:
                    if raised_by_handler(error):
                        raise
                    self._queue.popleft().failure = f"{STORE_GONE} ({error})"
                    continue
                if source is None:
                    return
                self._queue.popleft()
                try:
                    self._taken[source] += 1
                    receive.handle = self._start(receive.tensor, source)
                except BaseException as error:
                    # A caller that waits for it would otherwise wait without end.
                    receive.failure = str(error) or f"{type(error).__name__} came while the receive was started"
                    if not isinstance(error, RuntimeError) or raised_by_handler(error):
                        raise
                receive.source = source
            _waiting.discard(self)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Fail what is queued, and forget who starts receives: it owns this object."""
        with self._lock:
            for receive in self._queue:
                receive.failure = _DESTROYED
            self._queue.clear()
            _waiting.discard(self)
            self._start = _closed

    def _can_look(self) -> bool:
        with suppress(RuntimeError):
            self._store.check(["sent"])
            return self._counts
        return False

    def _next(self) -> int | None:
        """Return a rank that has sent more than was received from it."""
        for turn in range(self._size):
            source = (self._first + turn) % self._size
            if source != self._rank and self._has_sent(source):
                self._first = (source + 1) % self._size
                return source
        return None

    def _has_sent(self, source: int) -> bool:
        if self._announced[source] <= self._taken[source]:
            key = f"sent/{source}/{self._rank}"
            if self._store.check([key]):
                raw = self._store.get(key)
                if not (raw.isdigit() and len(raw) < _COUNT_DIGITS):
                    raise RuntimeError(
                        f"the store counts {raw[:20]!r} messages from rank {source}: another program writes to the "
                        "store of this job; give the job a port of its own"
                    )
                self._announced[source] = int(raw)
        return self._announced[source] > self._taken[source]


def match_all() -> bool:
    """Look for messages for what waits in any group; return whether something still waits."""
    for one in list(_waiting):
        one.match()
    return bool(_waiting)


def _closed(tensor: torch.Tensor, source: int) -> EngineHandle:
    raise RuntimeError(_DESTROYED)


def _below(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
