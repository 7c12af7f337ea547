"""Make groups after the world, together with their members, and say why one could not be made."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_utils import standard_descriptors
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.group_names import listed
from comm_utils.process_limits import lack_of_threads
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.connecting import is_still_connecting
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
        # Of the world and its groups, where others have taken their places: one may serve all ranks.
        self._replaced: list[Store] = []

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
            if is_still_connecting("gloo"):
                self._renew_connections()
            RECORDER.end_group(making_of(planned.name))
            own_turn.release()

    def _renew_connections(self) -> None:
        """Give the groups connections to the store other than the one in which a thread of gloo waits in vain."""
        groups: dict[Any, tuple[str, Any]] = internals._world.pg_map
        for group, (library, store) in list(groups.items()):
            with suppress(AttributeError, RuntimeError):  # not every store, and no old torch, opens another one
                groups[group] = library, store.clone()
                self._replaced.append(store)

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
        made = make_with_gloo(store, key, wait, rank, refusal, limit, create, c10d.destroy_process_group)
        addresses = [f"{made.group_name}//cpu//0/{one}" for one in range(len(group.ranks))]  # where gloo puts them
        delete_read_keys(store, addresses, f"{key}/connected-all", len(group.ranks))
        return made
