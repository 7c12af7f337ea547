"""Several groups at once, each rank in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup

from comm_collectives import arguments
from comm_collectives.annotations import Group, Timeout
from comm_collectives.arguments import describe, integer
from comm_collectives.groups import make_group, members
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["new_subgroups", "new_subgroups_by_enumeration", "split_group"]

_NOT_A_MEMBER = GroupMember.NON_GROUP_MEMBER


@with_keyword_errors
def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | Any, list[ProcessGroup | Any]]:
    """Cut ``group`` into groups of ``group_size`` neighbouring ranks; called by all of its members.

    Args:
        group_size: divides the size of ``group``; by default the number of this host's accelerators.
        timeout, backend, pg_options, group_desc: as for :func:`new_group`.

    Returns:
        This rank's group, and a list with an entry for each group, in the order of their ranks. A group that this rank
        is not in is ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        CommError: as for :func:`new_group`.
    """
    call = "new_subgroups"
    arguments.active(call)
    ranks = members(call, group)
    if group_size is None:
        group_size = torch.accelerator.device_count()
        if group_size == 0:
            raise ArgumentError(f"{call}: group_size: missing; this host has no accelerators whose number it could be")
    size = integer(call, "group_size", group_size)
    if size < 1 or len(ranks) % size:
        raise ArgumentError(
            f"{call}: group_size: got {size}; expected a divisor of {len(ranks)}, the number of ranks in the group"
        )
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return _made(call, map(sorted, parts), timeout, backend, pg_options, group_desc)


@with_keyword_errors
def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | Any, list[ProcessGroup | Any]]:
    """Make a group of each list of global ranks, no rank in two of them; called by all of these ranks.

    Args:
        ranks_per_subgroup_list: lists of global ranks.
        timeout, backend, pg_options, group_desc: as for :func:`new_group`.

    Returns:
        This rank's group, ``GroupMember.NON_GROUP_MEMBER`` where it is in none, and a list as in
        :func:`new_subgroups`.

    Raises:
        CommError: as for :func:`new_group`.
    """
    call, name = "new_subgroups_by_enumeration", "ranks_per_subgroup_list"
    arguments.active(call)
    parts = _lists(call, name, ranks_per_subgroup_list, len(members(call, None)))
    return _made(call, map(sorted, parts), timeout, backend, pg_options, group_desc)


@with_keyword_errors
def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | Any:
    """Split ``parent_pg``; called by all of its members, with the same lists. Works with every library.

    Args:
        parent_pg: the group to split; None is the world group.
        split_ranks: lists of ranks within ``parent_pg``, no rank in two of them; in each group they are in their order
            within ``parent_pg``.
        timeout, pg_options, group_desc: as for :func:`new_group`.
        backend: by default the library of ``parent_pg``.

    Returns:
        This rank's group, or None where it is in none.

    Raises:
        CommError: as for :func:`new_group`.
    """
    call, name = "split_group", "split_ranks"
    active = arguments.active(call)
    ranks = members(call, parent_pg, "parent_pg")
    if split_ranks is None:
        raise ArgumentError(f"{call}: {name}: missing; expected lists of ranks within the parent group")
    parts = [[ranks[position] for position in sorted(part)] for part in _lists(call, name, split_ranks, len(ranks))]
    if backend is None:
        backend = active.get_backend(parent_pg)
    group, _ = _made(call, parts, timeout, backend, pg_options, group_desc)
    return None if group is _NOT_A_MEMBER else group


def _lists(call: str, name: str, value: Any, size: int) -> list[list[int]]:
    """``value`` as lists of ranks below ``size``; checked as a whole, before any of the groups is made."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, (list, tuple, range)) for part in value):
        raise ArgumentTypeError(f"{call}: {name}: got {describe(value)}; expected a list of lists of ranks")
    parts = [[integer(call, name, rank) for rank in part] for part in value]
    seen = [rank for part in parts for rank in part]
    if len(set(seen)) != len(seen):
        raise ArgumentError(f"{call}: {name}: got {parts}, which names a rank twice")
    if not parts:
        raise ArgumentError(f"{call}: {name}: got an empty list; expected at least one list of ranks")
    if not all(parts):
        raise ArgumentError(f"{call}: {name}: got {parts}; expected no empty list")
    outside = [rank for rank in seen if not 0 <= rank < size]
    if outside:
        raise ArgumentError(f"{call}: {name}: got {parts}; expected ranks from 0 to {size - 1}, not {outside}")
    return parts


def _made(
    call: str,
    parts: Iterable[list[int]],
    timeout: Timeout,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
) -> tuple[ProcessGroup | Any, list[ProcessGroup | Any]]:
    made = [make_group(call, part, timeout, backend, pg_options, group_desc) for part in parts]
    return next((group for group in made if group is not _NOT_A_MEMBER), _NOT_A_MEMBER), made
