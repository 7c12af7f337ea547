"""Which groups there are, who is in them, and what becomes of them when something fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as c10d
from torch.distributed import GroupMember, ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_backend_torch import groups
from comm_backend_torch.failures import classify, in_short, told
from comm_backend_torch.gloo_workers import let_workers_rest
from comm_backend_torch.groups import GroupState
from comm_backend_torch.process_group import check_available
from comm_backend_torch.reduce_ops import set_async
from comm_backend_torch.work import SHORTEST, TorchWork, left
from comm_utils.backend import Capabilities, Work
from comm_utils.errors import BackendUnavailableError, NotInitializedError
from comm_utils.fast_path import FastPathCache

__all__ = ["World"]

T = TypeVar("T", bound="World")

# Those of other groups may be at work all the time.
_PATIENCE_S = 0.05


class World:
    """Every process group of this process, whoever created it.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """

    #: Overrides the names of operations in failures.
    _call = ""
    #: How long one call of the user's may take, instead of the group's timeout, and when that is over.
    _limit: timedelta | None = None
    _end: float | None = None

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[ProcessGroup, GroupState] = {}
        self.fast_paths = FastPathCache()
        self._views: dict[str, Any] = {}

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

    # --- who is where

    def is_initialized(self) -> bool:
        return c10d.is_initialized()

    def _state(self, group: ProcessGroup | None) -> GroupState:
        pg = GroupMember.WORLD if group is None else group
        state = self._groups.get(pg)  # type: ignore[arg-type]
        if state is None:
            state = self._remember(pg)
        return state

    def _remember(self, pg: ProcessGroup | None) -> GroupState:
        if pg is None or pg not in internals._world.pg_map:
            raise NotInitializedError(
                "this process group no longer exists; make a new one with new_group()"
                if pg is not None
                else "torch.distributed's world group no longer exists; call comm_orchestrator.init_distributed() again"
            )
        self._forget_ended()
        self._groups[pg] = state = GroupState(pg)
        return state

    def _forget_ended(self) -> None:
        # Groups can also be destroyed through torch.distributed; holding on to them would keep their sockets open.
        alive = internals._world.pg_map
        for pg in [pg for pg in self._groups if pg not in alive]:
            del self._groups[pg]
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
        store: Store = internals._world.pg_map[self._state(group).pg][1]
        return store

    def get_timeout(self) -> timedelta | None:
        return self._timeout

    def device_types(self, group: ProcessGroup | None = None) -> tuple[str, ...]:
        return self._state(group).devices

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        return self._state(group).capabilities[device_type]

    def empty_shared(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        self._state(group)
        return torch.empty(tuple(shape), dtype=dtype)

    def check_group(self, group: ProcessGroup | None = None) -> None:
        state = self._state(group)
        if state.pg not in internals._world.pg_map:  # destroyed through torch.distributed
            self._remember(state.pg)
        state.check()

    # --- groups

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
            try:
                check_available(backend)
            except BackendUnavailableError as error:
                raise BackendUnavailableError(f"new_group: {error}") from None
        limit = self._timeout if timeout is None else max(timeout, SHORTEST)
        try:
            return groups.create(ranks, name, limit, backend, pg_options, group_desc, device_id)
        except RuntimeError as error:
            kind = classify(error)
            if kind is None:
                raise
            rank = internals._get_default_group().rank()
            raise kind(
                f"new_group on rank {rank}: not every rank of {list(ranks)} came to make the group; all of them "
                f"have to call new_group, and as often with these ranks [{in_short(error)}]"
            ) from error

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        self._groups.pop(self._state(group).pg)
        if group is None:
            self._groups.clear()
        self.fast_paths.clear()
        let_workers_rest(_PATIENCE_S)
        c10d.destroy_process_group(group)

    # --- failures

    def _failure(self, operation: str, group: ProcessGroup | None, error: BaseException) -> BaseException:
        """``error`` as one of ours, after marking the group as broken; an unrelated one comes back as it is."""
        kind = classify(error)
        if kind is None:
            return error
        name, short = self._call or operation, in_short(error)
        try:
            state = self._state(group)
        except NotInitializedError:
            failure = kind(f"{name} failed after its group was destroyed [{short}]")
        else:
            state.broken = f"{name}: {short}"
            self.fast_paths.clear()
            limit_s = state.timeout_s() if self._limit is None else self._limit.total_seconds()
            text = told(kind, name, str(state), state.ranks[state.rank], error, limit_s, self._limit is not None)
            failure = kind(f"{text}. The group cannot be used any more: {state.how_to_go_on()} [{short}]")
        failure.__cause__ = error
        return failure

    def _finish(
        self, operation: str, work: Any, result: Any, group: ProcessGroup | None, async_op: bool
    ) -> Work | None:
        if async_op:
            return TorchWork(work, result, partial(self._failure, operation, group), self._end)
        if work is not None:
            try:
                if self._end is None:
                    work.wait()
                else:
                    work.wait(left(self._end))
            except RuntimeError as error:
                raise self._failure(operation, group, error) from error
        return None

    def _options(self, kind: type, async_op: bool) -> Any:
        """Options of c10d for one operation."""
        options = set_async(kind(), async_op)
        if self._end is not None:
            options.timeout = left(self._end)
        return options

    def _start(self, operation: str, group: ProcessGroup | None, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:
            raise self._failure(operation, group, error) from error
