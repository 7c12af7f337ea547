"""Calls that wait in a store for other ranks, where the watch sees them as it sees collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType

from comm_utils.errors import CommError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER, WAITED_FOR, Kind
from comm_utils.flight_recorder.store_steps import MAKING, name_of_step
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.failures import summarize
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = [
    "MAKING",
    "StoreWait",
    "answers",
    "await_keys",
    "delete_read_keys",
    "look_at_waits",
    "making_of",
    "store_has_gone",
]

# How often a rank that waits asks the store: at first, later, and later where it asks for very many keys.
_FIRST_PAUSE_S, _PAUSE_S, _PAUSE_S_OF_A_KEY = 0.0005, 0.02, 0.0002
# The rank that holds the store, unless a launcher does.
_HOLDER = 0
# A wait of so long is recorded.
_RECORDED_S = 0.1


class _Current(threading.local):
    """The waits of a thread, the innermost last."""

    def __init__(self) -> None:
        self.waits: list[StoreWait] = []


_CURRENT = _Current()


def look_at_waits() -> None:
    """Look at the waits of this thread, in the course of which the caller waits in its own way.

    Raises:
        PeerLostError, CollectiveMismatchError: the ranks wait in vain.
    """
    for wait in list(_CURRENT.waits):
        wait.look()


class StoreWait:
    """A call in which the ranks of a group wait for each other in a store: an open call of the flight recorder.

    It is recorded for a group of its own, so that it is no part of what the group's collectives have to agree about.

    Args:
        call: the user's.
        step: distinguishes the record from those of the group itself; the same on all ranks.
        rank: the global rank of this process.
        limit_s: the timeout, for the record.
        state: of the record; ``layout.LIMITED`` where the ranks go on after the timeout.
        is_alone: there is no watch yet, and no record is made.
    """

    def __init__(
        self,
        call: str,
        step: str,
        group: RingGroup,
        rank: int,
        limit_s: float | None,
        state: int = WAITED_FOR,
        is_alone: bool = False,
    ) -> None:
        self.call, self.group = call, replace(group, name=name_of_step(group.name, step))
        self._rank, self._limit_s, self._state, self.is_alone = rank, limit_s, state, is_alone
        self._kind: Kind | None = None
        self._number = 0

    def begin(self) -> None:
        """Record the call; later ones change nothing."""
        if self._kind is None:
            group = self.group
            index = RECORDER.group_index(group.name, group.ranks, group.description, group.backend, self._limit_s)
            kind = RECORDER.kind(index, "barrier", self.call)
            self._number = kind.begin(0, 1, None, None, self._state)
            self._kind = kind

    def __enter__(self) -> StoreWait:
        _CURRENT.waits.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _CURRENT.waits.remove(self)
        recorded, self._kind = self._kind, None
        if recorded is not None:
            (recorded.end if error is None else recorded.fail)(self._number)

    def until(
        self, store: BoundedStore, keys: Sequence[str], limit_s: float, look: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until ``keys`` are in the store; return False when the time is over.

        A wait that takes a moment is recorded, if it is not yet.

        Args:
            look: is called while it waits, besides :meth:`look`.

        Raises:
            PeerLostError, CollectiveMismatchError: the watch has found that the ranks wait in vain.
            PeerLostError: the store has gone; names the ranks that keep the others waiting.
            CommTimeoutError: the store does not answer.
        """

        def look_at_both() -> None:
            self.look()
            look()

        with self._while_it_answers(store):
            return await_keys(store, keys, limit_s, look_at_both)

    def absent(self, store: BoundedStore, keys: Mapping[int, str]) -> list[int]:
        """Return the ranks whose ``keys`` are not in the store when the time is over.

        Raises:
            PeerLostError: the store has gone; names the ranks that keep the others waiting.
            CommTimeoutError: the store does not answer.
        """
        with self._while_it_answers(store):
            return [rank for rank, key in keys.items() if not store.check([key])]

    @contextmanager
    def _while_it_answers(self, store: BoundedStore) -> Iterator[None]:
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            if self.is_alone or answers(store):
                raise
            # Its holder may have gone as a rank was lost, or as its own wait was over, which names nobody to blame.
            self.begin()
            trouble = WATCH.explain(self.group, timed_out=False) if WATCH.is_running else None
            if trouble is not None and trouble.kind is PeerLostError and trouble.ranks and _HOLDER not in trouble.ranks:
                raise self._failure(trouble) from error
            raise store_has_gone(f"{self.call} on rank {self._rank}", error, self._missing()) from error

    def _missing(self) -> str:
        self.begin()
        return WATCH.missing(self.group, asks=False)

    def look(self) -> None:
        """Record the call, if it is not yet; raise what the watch has found.

        Raises:
            PeerLostError, CollectiveMismatchError: the ranks wait in vain.
        """
        if self.is_alone:
            return
        self.begin()
        trouble = WATCH.trouble(self.group.name)
        if trouble is not None:
            raise self._failure(trouble)

    def _failure(self, trouble: Trouble) -> CommError:
        failure = trouble.kind(
            f"{self.call} on {self.group} {trouble.verb}, as seen by rank {self._rank}: {trouble.text}"
        )
        WATCH.tell(self.group.name, failure, trouble)
        return failure


def making_of(group: str) -> str:
    """Return the name under which the watch sees the making of the group of that name."""
    return name_of_step(group, MAKING)


def await_keys(store: BoundedStore, keys: Sequence[str], limit_s: float, look: Callable[[], object]) -> bool:
    """Wait until ``keys`` are in the store; return False when the time is over.

    Args:
        look: is called while a wait that takes a moment goes on; raises where it is in vain.
    """
    begin, pause_s = time.monotonic(), _FIRST_PAUSE_S
    longest_s = max(_PAUSE_S, _PAUSE_S_OF_A_KEY * len(keys))
    # Not store.wait(), of which each that ends in vain prints two warnings.
    while not store.check(keys):
        waited_s = time.monotonic() - begin
        if waited_s >= limit_s:
            return False
        if waited_s >= _RECORDED_S:
            look()
        time.sleep(min(pause_s, limit_s - waited_s))
        pause_s = min(2 * pause_s, longest_s)
    return True


def delete_read_keys(store: BoundedStore, keys: Sequence[str], counter: str, members: int) -> None:
    """Delete ``keys``, which so many members read, with the last of them; each calls this after it has read them.

    Args:
        counter: a key that counts the members; is deleted as well.
    """
    with suppress(RuntimeError):  # the store may have gone, and not every store deletes
        if store.add(counter, 1) == members:
            for key in (*keys, counter):
                store.delete_key(key)


def answers(store: BoundedStore) -> bool:
    """Return whether the server of a store is still there."""
    try:
        store.check(["comm-answers"])
    except RuntimeError:
        return False
    return True


def store_has_gone(who: str, error: BaseException, missing: str = "") -> PeerLostError:
    """Return the error of a call that finds the store gone.

    Args:
        who: the call and its rank.
        error: what torch raised.
        missing: which ranks had not made the call, and what they do instead, where that is known.
    """
    return PeerLostError(
        f"{who}: the store of the world has gone: the process that holds it, which is rank 0 unless a launcher holds "
        "it, has ended or cannot be reached; have all ranks call barrier() before that rank destroys the world"
        f"{f'. Until then, the call waited: {missing}' if missing else ''} [{summarize(error)}]"
    )
