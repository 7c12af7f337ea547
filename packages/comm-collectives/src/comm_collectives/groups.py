"""Groups and who is in them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_collectives import arguments
from comm_collectives.arguments import as_timedelta, enter, integer, is_member
from comm_collectives.collective import collective
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils.active import slot
from comm_utils.backend import Backend
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    CommTimeoutError,
    NotInitializedError,
)
from comm_utils.log import logger

__all__ = [
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_device_mesh",
    "initialize_mesh_device",
    "monitored_barrier",
    "new_group",
]


# How often this process has made a group of the same ranks; a part of its name, and so of its keys in the store.
_made: Counter[tuple[int, ...]] = Counter()


def forget_groups() -> None:
    """Start counting anew; the store of the next generation is empty."""
    _made.clear()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in ``group``; -1 where it is not a member."""
    if not is_member("get_rank", group):
        return -1
    try:
        return slot.backend.get_rank(group)
    except NotInitializedError as error:
        raise _named("get_rank", error) from None


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group``; -1 where this process is not a member."""
    if not is_member("get_world_size", group):
        return -1
    try:
        return slot.backend.get_world_size(group)
    except NotInitializedError as error:
        raise _named("get_world_size", error) from None


def _named(call: str, error: NotInitializedError) -> NotInitializedError:
    return NotInitializedError(f"{call}: {error}")


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of the members in the order of their ranks within ``group``."""
    return members("get_process_group_ranks", group)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """:func:`get_process_group_ranks`, by DeepSpeed's name."""
    return members("get_all_ranks_from_group", group)


@with_keyword_errors
def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of the member with ``group_rank``."""
    ranks = members("get_global_rank", group)
    if not 0 <= integer("get_global_rank", "group_rank", group_rank) < len(ranks):
        raise ArgumentError(f"get_global_rank: group_rank: got {group_rank}; expected 0 to {len(ranks) - 1}")
    return ranks[group_rank]


@with_keyword_errors
def get_group_rank(group: ProcessGroup | None, global_rank: int) -> int:
    """Return the rank within ``group`` of the member with ``global_rank``."""
    ranks = members("get_group_rank", group)
    if global_rank not in ranks:
        raise ArgumentError(f"get_group_rank: global_rank: got {global_rank}; expected one of {ranks}")
    return ranks.index(global_rank)


def members(call: str, group: ProcessGroup | None, name: str = "group") -> list[int]:
    """Return the global ranks of the members of the argument called ``name``, for ``call``."""
    if not is_member(call, group, name):
        raise ArgumentError(f"{call}: {name}: got one that this rank is not a member of; its members know their ranks")
    try:
        return slot.backend.get_process_group_ranks(group)
    except NotInitializedError as error:
        raise _named(call, error) from None


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks."""
    try:
        return slot.backend.get_world_group()
    except NotInitializedError as error:
        raise _named("get_world_group", error) from None


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the library that serves ``group``, such as ``"gloo"``."""
    if not is_member("get_backend", group):
        raise ArgumentError("get_backend: group: got a group that this rank is not a member of")
    try:
        return slot.backend.get_backend(group)
    except NotInitializedError as error:
        raise _named("get_backend", error) from None


@with_keyword_errors
def new_group(
    ranks: Iterable[int] | None = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Create the group of ``ranks``.

    May be called by all ranks or by the members alone: members meet among themselves, and a rank outside the group
    returns at once with ``GroupMember.NON_GROUP_MEMBER``, on which a collective does nothing. Ranks that share several
    groups create them in the same order.

    Args:
        ranks: global ranks; None for all.
        timeout: seconds or a timedelta; by default the one given to ``init_distributed``.
        backend: a library other than that of the world group, such as ``"gloo"``.
        pg_options: as in ``torch.distributed.new_group``.
        use_local_synchronization: accepted for compatibility; members always meet among themselves.
        group_desc: a name for logs.
        device_id: the device to bind the group to.
        sort_ranks: False keeps the order of ``ranks``, which then is the order of the ranks within the group.
    """
    call = "new_group"
    chosen = _checked_ranks(ranks, arguments.active(call).get_process_group_ranks(None))
    if sort_ranks:
        chosen = sorted(chosen)
    return make_group(call, chosen, timeout, backend, pg_options, group_desc, device_id)


def make_group(
    call: str,
    chosen: list[int],
    timeout: float | timedelta | None,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
    device_id: torch.device | None = None,
) -> Any:
    """:func:`new_group` of global ranks that are checked, in this order, for ``call``."""
    active = arguments.active(call)
    world = active.get_process_group_ranks(None)
    limit = as_timedelta(call, timeout)
    if not (backend is None or isinstance(backend, str)):
        raise ArgumentTypeError(f"{call}: backend: got {backend!r:.60}; expected a string such as 'gloo', or None")
    if world[active.get_rank(None)] not in chosen:
        return GroupMember.NON_GROUP_MEMBER
    key = tuple(chosen)
    # Only the members count, so that all of them arrive at one name whatever other groups each has made.
    digest = hashlib.sha256(",".join(map(str, key)).encode()).hexdigest()[:16]
    name = f"comm-{digest}-{_made[key] + 1}"
    try:
        group = active.create_group(chosen, name, limit, backend, pg_options, group_desc, device_id)
    except (ArgumentError, BackendUnavailableError):
        raise  # before anything was sent: the name is still free, here as on the other members
    except BaseException:
        _made[key] += 1
        raise
    _made[key] += 1
    return group


def _checked_ranks(ranks: Iterable[int] | None, world: Sequence[int]) -> list[int]:
    if ranks is None:
        return list(world)
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
        raise ArgumentTypeError(f"new_group: ranks: got {ranks!r}; expected a list of global ranks, or None for all")
    chosen = [integer("new_group", "ranks", rank) for rank in ranks]
    if not chosen:
        raise ArgumentError("new_group: ranks: got an empty list; expected at least one global rank")
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"new_group: ranks: got {chosen}, which names a rank twice")
    outside = [rank for rank in chosen if rank not in world]
    if outside:
        raise ArgumentError(f"new_group: ranks: got {chosen}; expected ranks from 0 to {len(world) - 1}, not {outside}")
    return chosen


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free ``group``, or everything; after the latter ``init_distributed`` works again."""
    backend = arguments.active("destroy_process_group")
    if not is_member("destroy_process_group", group):
        return
    if group is None:
        forget_groups()
    backend.destroy_process_group(group)


@with_keyword_errors
def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """Return a ``DeviceMesh`` over all ranks; its groups get the timeout given to ``init_distributed``.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        mesh_shape: ranks along every dimension of the mesh; their product is the world size.
        mesh_dim_names: a name for each dimension.
        options: passed to ``torch.distributed.device_mesh.init_device_mesh``.
    """
    from torch.distributed import device_mesh  # at the first use: it imports much that most programs never need

    backend = arguments.active("init_device_mesh")
    size = backend.get_world_size(None)
    if not isinstance(mesh_shape, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in mesh_shape):
        raise ArgumentTypeError(
            f"init_device_mesh: mesh_shape: got {mesh_shape!r}; expected a tuple of positive integers"
        )
    if device_type not in backend.device_types(None):
        raise ArgumentError(
            f"init_device_mesh: device_type: got {device_type!r}; backend {backend.get_backend(None)!r} serves "
            f"{' and '.join(backend.device_types(None))}"
        )
    if torch.Size(mesh_shape).numel() != size:
        raise ArgumentError(
            f"init_device_mesh: mesh_shape: got {tuple(mesh_shape)}, which is {torch.Size(mesh_shape).numel()} ranks; "
            f"expected a product of {size}, the world size"
        )
    timeout = backend.get_timeout()
    with _default_timeout(timeout):
        mesh = device_mesh.init_device_mesh(device_type, tuple(mesh_shape), mesh_dim_names=mesh_dim_names, **options)
    if timeout is not None:
        for group in mesh.get_all_groups():
            internals._set_pg_timeout(timeout, group)
    return mesh


_patching = threading.Lock()


@contextmanager
def _default_timeout(timeout: timedelta | None) -> Iterator[None]:
    """Give ``timeout`` to groups that torch creates in the block; gloo of torch 2.6 accepts no later change."""
    with _patching:
        original = internals._get_default_timeout
        if timeout is not None:
            internals._get_default_timeout = lambda backend: timeout
        try:
            yield
        finally:
            internals._get_default_timeout = original


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """:func:`init_device_mesh` by DeepSpeed's name, on the accelerator where the world group serves one."""
    accelerators = [
        device for device in arguments.active("initialize_mesh_device").device_types(None) if device != "cpu"
    ]
    available = [device for device in accelerators if getattr(torch, device).is_available()] if accelerators else []
    return init_device_mesh(available[0] if available else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)


@collective()
def monitored_barrier(
    group: ProcessGroup | None = None, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Run a barrier over the store that names missing ranks.

    Args:
        timeout: seconds or a timedelta; by default the one given to ``init_distributed``, or 30 minutes.
        wait_all_ranks: name every rank that is missing when the time is over, not only the first.

    Raises:
        CommTimeoutError: on every rank that arrived; names those that did not. The group stays usable.
    """
    backend = enter("monitored_barrier", group)
    if backend is None:
        return
    limit = as_timedelta("monitored_barrier", timeout)
    if limit is None:
        limit = backend.get_timeout() or timedelta(minutes=30)
    _meet(backend, group, limit.total_seconds(), wait_all_ranks)


_WAITING = "waiting"


def _meet(backend: Backend, group: ProcessGroup | None, limit_s: float, all_missing: bool) -> None:
    """Ranks count themselves in; the last one opens the barrier. One whose time is over counts itself out again.

    So a barrier is passed by all or by none, and all agree which one is next. Adding is atomic: who takes back a count
    that had been complete knows that the barrier was opened.
    """
    store, ranks, own = backend.get_store(group), backend.get_process_group_ranks(group), backend.get_rank(group)
    passed = f"comm/monitored_barrier/passed/{own}"
    number = store.add(passed, 0)
    prefix, before = f"comm/monitored_barrier/{number}", f"comm/monitored_barrier/{number - 1}"
    store.set(f"{prefix}/here/{own}", _WAITING)
    if store.add(f"{prefix}/count", 1) == len(ranks):
        store.set(f"{prefix}/open", "")
    elif not _opened(store, f"{prefix}/open", limit_s):
        missing = [rank for place, rank in enumerate(ranks) if not _came(store, f"{prefix}/here/{place}", limit_s)]
        if store.add(f"{prefix}/count", -1) < len(ranks) - 1:
            store.set(f"{prefix}/here/{own}", str(time.time()))
            raise _not_all(missing, limit_s, all_missing, len(ranks))
    store.add(passed, 1)
    # Who is here has left the one before.
    for key in (f"{before}/here/{own}", *((f"{before}/count", f"{before}/open") if own == 0 else ())):
        store.delete_key(key)


def _came(store: Store, key: str, limit_s: float) -> bool:
    """Return whether a rank is at the barrier, or has only just given up."""
    if not store.check([key]):
        return False
    found = store.get(key).decode()
    return found == _WAITING or float(found) > time.time() - limit_s


def _opened(store: Store, key: str, limit_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, limit_s)))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def _not_all(missing: list[int], limit_s: float, all_missing: bool, size: int) -> CommTimeoutError:
    if not missing:
        return CommTimeoutError(
            f"monitored_barrier: every rank came, but not all within the same {limit_s:g} s: some had given up before"
        )
    hint = "" if all_missing or size == 2 else " (wait_all_ranks=True names all that are missing)"
    named = missing if all_missing else missing[:1]
    logger.error("monitored_barrier: ranks %s did not arrive within %g s", named, limit_s)
    plural = "ranks" if len(named) > 1 else "rank"
    return CommTimeoutError(
        f"monitored_barrier: {plural} {', '.join(map(str, named))} did not arrive within {limit_s:g} s{hint}"
    )
