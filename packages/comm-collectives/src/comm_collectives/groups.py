"""Groups and who is in them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup

from comm_collectives import arguments, background
from comm_collectives.annotations import Group, Timeout
from comm_collectives.arguments import as_timedelta, describe, enter, integer, is_member
from comm_collectives.collective import collective
from comm_collectives.compression.selection import forget_choices
from comm_collectives.hierarchy.choice import forget_settings
from comm_collectives.hierarchy.layout import set_hosts
from comm_collectives.hierarchy.plan import forget_plans
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.reduction import forget_orders
from comm_utils.active import slot
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    NotInitializedError,
)
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.given import shown
from comm_utils.group_names import listed
from comm_utils.torch_support.monitored_barrier import pass_monitored_barrier
from comm_utils.torch_support.plain_tensors import present

__all__ = [
    "destroy_process_group",
    "forget_groups",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "make_group",
    "members",
    "monitored_barrier",
    "new_group",
]


# How often this process has made a group of the same ranks; a part of its name, and so of its keys in the store.
_made: Counter[tuple[int, ...]] = Counter()


def forget_groups() -> None:
    """Start counting anew; the store of the next generation is empty."""
    _made.clear()
    forget_choices()
    forget_orders()
    background.forget()
    forget_plans()
    forget_settings()
    set_hosts(None)


def get_rank(group: Group = None) -> int:
    """Return this process's rank in ``group``; -1 where it is not a member.

    Args:
        group: a process group; None is the world group.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentTypeError: ``group`` is no process group.
    """
    if not is_member("get_rank", group):
        return -1
    try:
        return slot.backend.get_rank(group)
    except NotInitializedError as error:
        raise _named("get_rank", error) from None


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in ``group``; -1 where this process is not a member.

    Args:
        group: a process group; None is the world group.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentTypeError: ``group`` is no process group.
    """
    if not is_member("get_world_size", group):
        return -1
    try:
        return slot.backend.get_world_size(group)
    except NotInitializedError as error:
        raise _named("get_world_size", error) from None


def _named(call: str, error: NotInitializedError) -> NotInitializedError:
    return NotInitializedError(f"{call}: {error}")


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of the members in the order of their ranks within ``group``.

    Args:
        group: a process group; None is the world group.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentError: this rank is not a member of ``group``.
        ArgumentTypeError: ``group`` is no process group.
    """
    return members("get_process_group_ranks", group)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return :func:`get_process_group_ranks`; DeepSpeed's name of it. The list is empty where this rank is no member.

    Args:
        group: a process group; None is the world group.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentTypeError: ``group`` is no process group.
    """
    call = "get_all_ranks_from_group"
    return members(call, group) if is_member(call, group) else []


@with_keyword_errors
def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the global rank of the member with ``group_rank``.

    Args:
        group_rank: 0 to the size of ``group`` minus 1.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentError: ``group`` has no such rank, or this rank is not a member of it.
    """
    ranks = members("get_global_rank", group)
    position = integer("get_global_rank", "group_rank", group_rank)
    if not 0 <= position < len(ranks):
        raise ArgumentError(f"get_global_rank: group_rank: got {shown(position)}; expected 0 to {len(ranks) - 1}")
    return ranks[position]


@with_keyword_errors
def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank within ``group`` of the member with ``global_rank``.

    Args:
        global_rank: of a member of ``group``.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentError: ``global_rank`` or this rank is not a member of ``group``.
    """
    ranks = members("get_group_rank", group)
    rank = integer("get_group_rank", "global_rank", global_rank)
    if rank not in ranks:
        raise ArgumentError(f"get_group_rank: global_rank: got {shown(rank)}; expected one of {listed(ranks)}")
    return ranks.index(rank)


def members(call: str, group: Group, name: str = "group") -> list[int]:
    """Return the global ranks of the members of the argument called ``name``, for ``call``."""
    if not is_member(call, group, name):
        raise ArgumentError(f"{call}: {name}: got one that this rank is not a member of; its members know their ranks")
    try:
        return slot.backend.get_process_group_ranks(group)
    except NotInitializedError as error:
        raise _named(call, error) from None


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
    """
    try:
        return slot.backend.get_world_group()
    except NotInitializedError as error:
        raise _named("get_world_group", error) from None


def get_backend(group: Group = None) -> str:
    """Return the library that serves ``group``, such as ``"gloo"``.

    Args:
        group: a process group; None is the world group.

    Raises:
        NotInitializedError: nothing is initialised, or the group was destroyed.
        ArgumentError: this rank is not a member of ``group``.
        ArgumentTypeError: ``group`` is no process group.
    """
    if not is_member("get_backend", group):
        raise ArgumentError("get_backend: group: got a group that this rank is not a member of")
    try:
        return slot.backend.get_backend(group)
    except NotInitializedError as error:
        raise _named("get_backend", error) from None


@with_keyword_errors
def new_group(
    ranks: Iterable[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | Any:
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

    Raises:
        NotInitializedError: nothing is initialised.
        BackendUnavailableError: a member lacks what the library needs, or ``backend`` cannot be had; on every member.
        CommTimeoutError: not every member came in time. The world stays usable.
        PeerLostError: a member ended or gave up before the group was made, or could not be connected.
        CollectiveMismatchError: members make other calls instead.
    """
    call = "new_group"
    chosen = _checked_ranks(ranks, arguments.active(call).get_process_group_ranks(None))
    if sort_ranks:
        chosen = sorted(chosen)
    return make_group(call, chosen, timeout, backend, pg_options, group_desc, device_id)


def make_group(
    call: str,
    chosen: list[int],
    timeout: Timeout,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
    device_id: torch.device | None = None,
) -> ProcessGroup | Any:
    """:func:`new_group` of global ranks that are checked, in this order, for ``call``."""
    active = arguments.active(call)
    world = active.get_process_group_ranks(None)
    limit = as_timedelta(call, timeout)
    if not (backend is None or isinstance(backend, str)):
        raise ArgumentTypeError(f"{call}: backend: got {shown(backend)}; expected a string such as 'gloo', or None")
    if not (group_desc is None or isinstance(group_desc, str)):
        raise ArgumentTypeError(f"{call}: group_desc: got {shown(group_desc)}; expected a string, or None")
    if device_id is not None:
        _check_device_id(call, device_id)
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


def _check_device_id(call: str, device: Any) -> None:
    wanted = "expected a torch.device of an accelerator with an index, such as torch.device('cuda:0'), or None"
    if not isinstance(device, torch.device):
        raise ArgumentTypeError(f"{call}: device_id: got {describe(device)}; {wanted}")
    if device.type in ("cpu", "meta") or device.index is None:
        raise ArgumentError(f"{call}: device_id: got {device}; {wanted}")
    if not present([device.type]) or device.index >= torch.get_device_module(device.type).device_count():
        raise ArgumentError(f"{call}: device_id: got {device}, which this process does not see; {wanted}")


def _checked_ranks(ranks: Iterable[int] | None, world: Sequence[int]) -> list[int]:
    if ranks is None:
        return list(world)
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)) or getattr(ranks, "ndim", 1) == 0:
        raise ArgumentTypeError(
            f"new_group: ranks: got {shown(ranks)}; expected a list of global ranks, or None for all"
        )
    chosen = [integer("new_group", "ranks", rank) for rank in ranks]
    if not chosen:
        raise ArgumentError("new_group: ranks: got an empty list; expected at least one global rank")
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"new_group: ranks: got {chosen}, which names a rank twice")
    outside = [rank for rank in chosen if rank not in world]
    if outside:
        raise ArgumentError(f"new_group: ranks: got {chosen}; expected ranks from 0 to {len(world) - 1}, not {outside}")
    return chosen


def destroy_process_group(group: Group = None) -> None:
    """Free ``group``, or everything; after the latter ``init_distributed`` works again."""
    backend = arguments.active("destroy_process_group")
    if not is_member("destroy_process_group", group):
        return
    if group is None:
        forget_groups()
    else:
        own = background.forget(group)
        for made in (*([] if own is None else [*forget_plans(own), own]), *forget_plans(group)):
            backend.destroy_process_group(made)
    try:
        backend.destroy_process_group(group)
    except NotInitializedError as error:
        raise _named("destroy_process_group", error) from None


@collective()
def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Run a barrier over the store that names missing ranks.

    Args:
        timeout: seconds or a timedelta; by default the one given to ``init_distributed``, or 30 minutes.
        wait_all_ranks: name every rank that is missing when the time is over, not only the first.

    Raises:
        CommTimeoutError: on every rank that arrived; names those that did not. The group stays usable.
        PeerLostError: a member has ended.
    """
    backend = enter("monitored_barrier", group)
    if backend is None:
        return
    limit = as_timedelta("monitored_barrier", timeout)
    if limit is None:
        limit = backend.get_timeout() or timedelta(minutes=30)
    pass_monitored_barrier(
        backend.get_store(group),
        backend.get_rank(group),
        RingGroup.of(backend.get_world_group() if group is None else group, backend.get_process_group_ranks(group)),
        limit.total_seconds(),
        wait_all_ranks,
    )
