"""Make groups after the world, together with their members, and say why one could not be made."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as c10d
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_utils import standard_descriptors
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.group_names import listed
from comm_utils.process_limits import lack_of_threads
from comm_utils.process_locks import ProcessLock
from comm_utils.threads import abandoned
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.failures import classify, is_exhausted, summarize
from comm_utils.torch_support.group_agreement import agree, make_with_gloo
from comm_utils.torch_support.initialization import device_libraries, gloo_refusal
from comm_utils.torch_support.store_waits import (
    MAKING,
    StoreWait,
    answers,
    delete_read_keys,
    making_of,
    store_has_gone,
)
from comm_utils.watch.watch import WATCH

__all__ = ["GroupMaker"]

# Libraries whose groups come to be when all members have come; those of others come to be with the first call.
_WAIT_FOR_MEMBERS = frozenset(("gloo", "ccl"))


class _Turn:
    """The turn to make a group, of which a process makes one at a time.

    Threads that make groups at once would wait for each other in the one connection to the store, and take sockets of
    another group for their own.
    """

    turn = ProcessLock(threading.Lock)
    holder = ""

    @classmethod
    def take(cls, call: str, who: str, ranks: Sequence[int], limit: timedelta | None) -> threading.Lock:
        """Wait for the turn; the caller releases what this returns.

        Raises:
            CommTimeoutError: another thread has it all the time; names what it makes.
        """
        lock, limit_s = cls.turn.lock, -1.0 if limit is None else min(limit.total_seconds(), threading.TIMEOUT_MAX)
        if not lock.acquire(timeout=limit_s):
            raise CommTimeoutError(
                f"{who}: the group of ranks {listed(ranks)} was not made: for {limit_s:g} s, another thread of this "
                f"process makes {cls.holder}, and groups are made one after the other; have all ranks make their "
                "groups in the same order"
            )
        cls.holder = f"the group of ranks {listed(ranks)} in {call}"
        return lock


class GroupMaker:
    """Makes the groups of one world."""

    def __init__(self) -> None:
        # Of making a group, by its name, which is free again after a refusal.
        self._attempts: Counter[str] = Counter()
        # Of the world, where others have taken their places: one may serve all ranks.
        self._replaced: list[Store] = []
        # Threads of gloo that wait in them.
        self._abandoned: WeakSet[threading.Thread] = WeakSet()

    def make(
        self,
        call: str,
        planned: RingGroup,
        rank: int,
        store: Store,
        limit: timedelta | None,
        create: Callable[[], ProcessGroup],
    ) -> ProcessGroup:
        """Return the group that ``create`` returns, once its members can create it.

        Args:
            call: the user's.
            planned: the group, with its library as the backend.
            rank: the global rank of this process.
            store: the world's.
            limit: the group's timeout; None is the library's own.

        Raises:
            BackendUnavailableError: a member lacks what the library needs; on every one.
            CommTimeoutError, PeerLostError, CollectiveMismatchError: not every member came, or could be connected.
        """
        ranks, who = list(planned.ranks), f"{call} on rank {rank}"
        waits_for_members = bool({*device_libraries(planned.backend).values()} & _WAIT_FOR_MEMBERS)
        standard_descriptors.occupy()  # the program may have closed one since the world was made
        own_turn = _Turn.take(call, who, ranks, limit)
        try:
            limit_s = None if limit is None else limit.total_seconds()
            waiting = limit or internals._get_default_timeout(internals.Backend("gloo"))
            bounded = BoundedStore(store, who, waiting.total_seconds())
            with StoreWait(call, MAKING, planned, rank, limit_s) as wait:
                return self._with_members(wait, rank, bounded, waiting, create) if waits_for_members else create()
        except BackendUnavailableError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, CommError) and is_exhausted(error):  # it may quote what another rank lacks
                lack = lack_of_threads(error) or (
                    f"the system refused what a group of {len(ranks)} ranks needs; destroy groups that are not used "
                    "any more, or raise the limits of descriptors (ulimit -n) and of memory (ulimit -v) "
                    f"[{summarize(error)}]"
                )
                raise BackendUnavailableError(f"{who}: {lack}") from error
            kind = classify(error)
            if kind is None or isinstance(error, CommError):
                raise
            if not answers(bounded):
                raise store_has_gone(who, error) from error
            cause = WATCH.explain(planned, False) if WATCH.is_running else None
            if cause is not None:  # the others were done, and had no more use for it
                raise cause.kind(
                    f"{who}: the group of ranks {listed(ranks)} ended while it was made: {cause.text} "
                    f"[{summarize(error)}]"
                ) from error
            if waits_for_members:
                raise kind(
                    f"{who}: all ranks of {listed(ranks)} came to make the group, but this one could not be connected "
                    f"with each of them; check the network between their hosts [{summarize(error)}]"
                ) from error
            raise kind(
                f"{who}: not every rank of {listed(ranks)} came to make the group; all of them have to call {call}, "
                f"and as often with these ranks [{summarize(error)}]"
            ) from error
        finally:
            RECORDER.end_group(making_of(planned.name))
            own_turn.release()

    def _leave_connection(self, store: BoundedStore, wait: StoreWait) -> None:
        """Have the groups use the connection of the failed attempt where a thread of gloo waits in that of the world.

        Args:
            store: the world's. The attempt has asked the others in its own connection, so no other one is opened,
                unless the store has gone meanwhile.
            wait: of the attempt.
        """
        new = set(abandoned("gloo")).difference(self._abandoned)
        try:
            other = store.with_own_connection(wait.look) if new else store
        except CommError:  # the store does not answer in another one either
            return
        if other is store:
            return
        self._abandoned.update(new)
        self._replaced.append(store.unbounded)
        groups: dict[Any, tuple[str, Any]] = internals._world.pg_map
        for group, (library, one) in list(groups.items()):
            if one is store.unbounded:
                renewed = other.unbounded
            elif isinstance(one, PrefixStore) and one.underlying_store is store.unbounded:
                renewed = PrefixStore(f"{group.group_name}/", other.unbounded)  # as torch does
            else:
                continue
            if group in groups:  # another thread may destroy it
                groups[group] = library, renewed

    def _with_members(
        self,
        wait: StoreWait,
        rank: int,
        store: BoundedStore,
        limit: timedelta,
        create: Callable[[], ProcessGroup],
    ) -> ProcessGroup:
        """Make a group whose library waits for all members; refuse it on all if one cannot open what it needs."""
        group, library = wait.group, wait.group.backend
        refusal = gloo_refusal(f"{wait.call}: rank {rank}", library, len(group.ranks))
        self._attempts[group.name] += 1
        key = f"comm-ready/{group.name}/{self._attempts[group.name]}"
        if "ccl" in device_libraries(library).values():  # its members connect in their own way
            agree(store, key, wait, rank, refusal, limit)
            return create()
        try:
            made = make_with_gloo(store, key, wait, rank, refusal, limit, create, c10d.destroy_process_group)
        except BaseException:
            self._leave_connection(store, wait)
            raise
        addresses = [f"{made.group_name}//cpu//0/{one}" for one in range(len(group.ranks))]  # where gloo puts them
        delete_read_keys(store, addresses, f"{key}/connected-all", len(group.ranks))
        return made
