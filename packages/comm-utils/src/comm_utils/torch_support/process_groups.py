"""The base class of backends: the process groups of this process, their members, failures and end."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as c10d
from torch.distributed import GroupMember, ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_utils.active import how_to_initialize
from comm_utils.backend import without_spaces
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, NotInitializedError
from comm_utils.fast_path import FastPathCache
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.given import SHORTEST_TIMEOUT
from comm_utils.log import logger
from comm_utils.torch_support import factories, group_state
from comm_utils.torch_support.breakable_group import DESTROYED_DURING_CALL
from comm_utils.torch_support.device_calls import abort_communicators, allow_queries, restore_settings
from comm_utils.torch_support.failures import after_text, classify, format_failure, is_exhausted, summarize
from comm_utils.torch_support.gloo_connections import end_connections, keep_in_memory
from comm_utils.torch_support.gloo_workers import wait_until_idle
from comm_utils.torch_support.group_creation import GroupMaker
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.initialization import check_available
from comm_utils.torch_support.observed_world import begin_world, end_world
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH
from comm_utils.weak_collections import members_of

__all__ = ["ProcessGroups"]

# gloo's threads of other groups may be busy all the time.
_PATIENCE_S = 0.05
# NCCL's own watchdog ends the process at a group's timeout. The watch comes so much earlier, for short ones by a part.
_BEFORE_TIMEOUT_S, _PART_OF_TIMEOUT = 1.0, 0.25

T = TypeVar("T", bound="ProcessGroups")


_backends: weakref.WeakSet[ProcessGroups] = weakref.WeakSet()
#: Groups that existed when this process was forked off.
_inherited: set[Any] = set()


def _refuse_inherited_groups() -> None:
    for group in internals._world.pg_map:
        _inherited.add(group)
        keep_in_memory(group)  # its destructor would wait for threads, of which a child has none
    for backend in members_of(_backends):
        backend.fast_paths.clear()
        for state in backend._states.values():
            state.inherit()


os.register_at_fork(after_in_child=_refuse_inherited_groups)


class ProcessGroups:
    """Every process group of this process, also those of other code. Backends derive from it and add operations.

    Make one when the world group exists: this opens the flight recorder for that world, and starts the watch.

    It implements those methods of ``comm_utils.backend.Backend`` that need no particular library; see there for what
    each of them does.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """

    #: The user's call; replaces the names of operations in messages.
    _call = ""
    #: The timeout of one call, instead of the group's, and its end by the monotonic clock.
    _limit: timedelta | None = None
    _end: float | None = None

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._states: dict[ProcessGroup, GroupState] = {}
        # Groups that this process destroys at present.
        self._ending: set[ProcessGroup] = set()
        self.fast_paths = FastPathCache()
        self._views: dict[str, Any] = {}
        self._maker = GroupMaker()
        _backends.add(self)
        if c10d.is_initialized():
            begin_world()

    def during(self: T, call: str, timeout: timedelta | None = None) -> T:
        view = self._views.get(call)
        if view is None:
            view = self._views[call] = copy(self)
            view._call = call
        if timeout is not None:
            view = copy(view)
            view._limit = timeout
            view._end = time.monotonic() + timeout.total_seconds()
        return cast(T, view)

    # --- members

    def is_initialized(self) -> bool:
        return c10d.is_initialized()

    def _state(self, group: ProcessGroup | None) -> GroupState:
        pg = GroupMember.WORLD if group is None else group
        state = self._states.get(pg)  # type: ignore[arg-type]
        if state is None:
            state = self._remember(pg)
        return state

    def _remember(self, pg: ProcessGroup | None) -> GroupState:
        if pg is None or pg not in internals._world.pg_map:
            raise NotInitializedError(
                "this process group no longer exists, or was made without new_group(); make a new one with new_group()"
                if pg is not None
                else f"torch.distributed's world group no longer exists; {how_to_initialize()} again"
            )
        self._forget_ended()
        self._states[pg] = state = GroupState(pg)
        if pg in _inherited:
            state.inherit()
        return state

    def _forget_ended(self) -> None:
        # Groups can also be destroyed through torch.distributed; a reference to them would keep their sockets open.
        alive = internals._world.pg_map
        ended = [pg for pg in self._states if pg not in alive]
        names = {str(pg.group_name) for pg in alive} if ended else set()
        for pg in ended:
            state = self._states.pop(pg)
            state.close_device_calls()
            if state.name not in names:  # which torch may give again
                RECORDER.end_group(state.name)
        self.fast_paths.clear()

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        libraries = self._state(group).libraries
        names = set(libraries.values())
        return names.pop() if len(names) == 1 else ",".join(f"{device}:{name}" for device, name in libraries.items())

    def get_rank(self, group: ProcessGroup | None = None) -> int:
        return self._state(group).rank

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        return len(self._state(group).ranks)

    def get_process_group_ranks(self, group: ProcessGroup | None = None) -> list[int]:
        return list(self._state(group).ranks)

    def get_world_group(self) -> ProcessGroup:
        return self._state(None).pg

    def get_store(self, group: ProcessGroup | None = None) -> Store:
        state = self._state(group)
        state.check_process()  # the connection to the store is the parent's
        store: Store = internals._world.pg_map[state.pg][1]
        return store

    def get_timeout(self) -> timedelta | None:
        return self._timeout

    def device_types(self, group: ProcessGroup | None = None) -> tuple[str, ...]:
        return self._state(group).devices

    def empty_shared(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        self._state(group)
        return factories.empty(tuple(shape), dtype=dtype, device="cpu")

    def check_group(self, group: ProcessGroup | None = None) -> None:
        state = self._state(group)
        if state.is_destroyed:  # through torch.distributed
            self._remember(state.pg)
        state.check()

    # --- creation and end

    def create_group(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
    ) -> ProcessGroup:
        if backend is not None:
            backend = without_spaces(backend)
            try:
                check_available(backend)
            except BackendUnavailableError as error:
                raise BackendUnavailableError(f"new_group: {error}") from None
        own_rank = internals._get_default_group().rank()
        library = backend or internals._world.pg_map[internals._get_default_group()][0]
        limit = self._timeout if timeout is None else max(timeout, SHORTEST_TIMEOUT)
        planned = RingGroup(name, tuple(ranks), group_desc or "", library)

        def create() -> ProcessGroup:
            return group_state.create_group(ranks, name, limit, backend, pg_options, group_desc, device_id)

        return self._maker.make(self._call or "new_group", planned, own_rank, self.get_store(), limit, create)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        state = self._state(group)
        if state.is_destroyed:  # through torch.distributed
            self._remember(state.pg)
        del self._states[state.pg]
        ending = [state]
        if group is None:
            ending += self._states.values()
            self._states.clear()
        self._ending.update(one.pg for one in ending)
        try:
            self._destroy(group, state, ending)
        finally:
            self._ending.difference_update([one.pg for one in ending])
        if group is None:
            restore_settings(os.environ)

    def _destroy(self, group: ProcessGroup | None, state: GroupState, ending: Sequence[GroupState]) -> None:
        ended = self._end_unfinished([one for one in ending if one.broken is None])
        for one in ending:
            one.close_device_calls()
            RECORDER.end_group(one.name)
        if group is None:
            end_world()
        self.fast_paths.clear()
        broken = [one for one in ending if one.broken is not None and not one.inherited]
        for one in broken:
            end_connections(one.pg)  # or torch would wait until what is under way there times out
        for one in ending:
            if not one.inherited:
                self._wake(one)
        # A device may work for a group that is not broken, until the world is.
        for one in ending if state in broken else broken:
            abort_communicators(one.pg, one.libraries)
        wait_until_idle(_PATIENCE_S)
        self._release([*ended, *broken])
        c10d.destroy_process_group(group)

    def _end_unfinished(self, states: Sequence[GroupState]) -> list[GroupState]:
        """End operations that nobody waited for and that cannot end, as others do not take part: threads wait in them.

        The store of the group would outlive it with them, and be in the way of another world.

        Returns:
            their groups.
        """
        found = WATCH.unfinished([one.for_diagnosis() for one in states])
        unfinished = [one for one in states if one.name in found]
        for one in unfinished:
            logger.error("rank %d ends %s while %s", one.ranks[one.rank], one, found[one.name])
            end_connections(one.pg)
        return unfinished

    def _wake(self, state: GroupState) -> None:
        """Have the threads go on that wait in a broken group."""

    def _release(self, ended: Sequence[GroupState]) -> None:
        """Keep those groups, of which the connections were ended, that torch cannot destroy without waiting."""

    # --- failures

    def _in_trouble(self, group: str, trouble: Trouble) -> None:
        """Have the calls of a group fail; called by the watch, in its thread."""
        for pg in list(internals._world.pg_map):
            if pg.group_name == group:
                state = self._state(pg)
                state.fall_into(trouble)
                self.fast_paths.clear()
                end_connections(pg)
                had_calls = state.close_device_calls()
                if abort_communicators(pg, state.libraries) and had_calls:
                    logger.error(
                        "rank %d has ended the calls of %s on the device, so their results are undefined: %s; the next "
                        "call on this group raises %s",
                        state.ranks[state.rank],
                        state,
                        trouble.text,
                        trouble.kind.__name__,
                    )
                self._wake(state)

    def _look_at_devices(self) -> None:
        """Bring the records of calls on devices up to date, and end groups whose time is over."""
        for state in list(self._states.values()):
            for calls in list(state.device_calls.values()):
                age_s = calls.look()
                limit_s = state.timeout_s() if age_s and state.broken is None else None
                if limit_s is not None and age_s > limit_s - min(_BEFORE_TIMEOUT_S, limit_s * _PART_OF_TIMEOUT):
                    WATCH.found(state.name, _overdue(state, age_s, limit_s))

    def mark_broken(self, group: ProcessGroup | None, reason: str) -> None:
        self._state(group).give_up(reason)
        self.fast_paths.clear()

    def _failure(self, operation: str, state: GroupState, error: BaseException) -> BaseException:
        """Mark the group as broken and return ``error`` as a :class:`CommError`; return an unrelated one as it is."""
        if isinstance(error, CommError):  # the watch has found it first
            return error
        kind = classify(error)
        if kind is None and is_exhausted(error):
            kind = BackendUnavailableError
        if kind is None:
            return error
        name, short = self._call or operation, summarize(error)
        if state.pg in self._ending or state.is_destroyed:
            failure: CommError = NotInitializedError(f"{name} on {state} failed: {DESTROYED_DURING_CALL} [{short}]")
        else:
            failure = self._explained(kind, name, short, self._state(state.pg), error)
        failure.__cause__ = error
        return failure

    def _explained(
        self, kind: type[CommError], name: str, short: str, state: GroupState, error: BaseException
    ) -> CommError:
        """Return the error of a failed call, with the cause as far as rings and other ranks tell."""
        if kind is BackendUnavailableError:
            return self._lacking(name, short, state)
        trouble = _cause(state.for_diagnosis(), kind is CommTimeoutError)
        state.give_up(f"{name}: {short if trouble is None else f'{short}; {trouble.short}'}")
        self.fast_paths.clear()
        limit_s = state.timeout_s() if self._limit is None else self._limit.total_seconds()
        rank, of_call = state.ranks[state.rank], self._limit is not None
        if trouble is None:
            text = format_failure(kind, name, str(state), rank, error, limit_s, of_call)
        else:
            after = f"timed out{after_text(error, limit_s, of_call)}" if kind is CommTimeoutError else trouble.verb
            text = f"{name} on {state} {after}, as seen by rank {rank}: {trouble.text}"
            kind = trouble.kind
        failure = kind(f"{text}. The group cannot be used any more: {state.how_to_go_on()} [{short}]")
        WATCH.tell(state.name, failure, trouble)
        return failure

    def _lacking(self, name: str, short: str, state: GroupState) -> CommError:
        """Return the error where this process has no memory, thread or descriptor for a call."""
        state.give_up(f"{name}: {short}")
        self.fast_paths.clear()
        failure = BackendUnavailableError(
            f"{name} on {state} failed on rank {state.ranks[state.rank]}, whose process lacks what the call needs: "
            f"{short}. The group cannot be used any more: {state.how_to_go_on()}"
        )
        WATCH.tell_of_lack(state.name, name, failure, short)
        return failure


def _cause(group: RingGroup, timed_out: bool) -> Trouble | None:
    """Return why a call, or the making, of a group failed, as far as rings and other ranks tell."""
    return WATCH.explain(group, timed_out) if WATCH.is_running else None


def _overdue(state: GroupState, age_s: float, limit_s: float) -> Trouble:
    """Return why a call that a device has not completed in time does not go on."""
    cause = _cause(state.for_diagnosis(), timed_out=True)
    if cause is None:
        cause = Trouble(CommTimeoutError, "all ranks that can be seen from here are in this call", ())
    text = f"the device has not completed a call in {age_s:.1f} s (the timeout is {limit_s:g} s): {cause.text}"
    return Trouble(cause.kind, text, cause.ranks)


def _announce(group: str, trouble: Trouble) -> None:
    for backend in members_of(_backends):
        backend._in_trouble(group, trouble)


def _end_waits_on_destroyed() -> None:
    """End waits for messages of groups that ``torch.distributed`` has destroyed meanwhile."""
    for backend in members_of(_backends):
        for state in list(backend._states.values()):
            if state.awaited_messages and state.is_destroyed:
                backend._wake(state)


def _look_at_devices() -> None:
    backends = members_of(_backends)
    if any(state.device_calls for one in backends for state in list(one._states.values())):
        allow_queries()
    for backend in backends:
        backend._look_at_devices()


WATCH.when_in_trouble(_announce)
WATCH.before_each_look(_look_at_devices)
WATCH.before_each_look(_end_waits_on_destroyed)
