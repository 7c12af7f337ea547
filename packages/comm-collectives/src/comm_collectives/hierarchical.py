"""Collectives in steps within hosts and between them."""

from __future__ import annotations

from comm_collectives import arguments
from comm_collectives.annotations import Group
from comm_collectives.compression.agreement import Agreement
from comm_collectives.hierarchy.choice import set_setting
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.measured_choice import AUTO
from comm_collectives.wrapping import bare_backend
from comm_utils.errors import ArgumentError
from comm_utils.given import shown

__all__ = ["set_hierarchical"]


@with_keyword_errors
def set_hierarchical(min_size_bytes: int | str | bool | None = AUTO, group: Group = None) -> None:
    """Choose which collectives on ``group`` are hierarchical: in steps within each host and steps between hosts.

    All ranks of the group call this alike, with no operation under way: they compare their arguments first. It concerns
    ``all_reduce``, ``reduce_scatter``, ``all_gather`` and ``broadcast`` of tensors on the CPU, in groups with ranks on
    several hosts and as many, two or more, on each. Other calls are as they are without it.

    Args:
        min_size_bytes: the size of the larger one of input and output from which on calls are hierarchical; ``"auto"``
            for that at which the group measures them to be faster; False or None for never.
        group: None for the world group and all groups that have no choice of their own.

    Raises:
        ArgumentError: ``min_size_bytes`` is none of these.
        CollectiveMismatchError: the ranks gave different arguments; on every rank, and nothing has changed.
    """
    call = "set_hierarchical"
    arguments.active(call)
    if min_size_bytes is None or min_size_bytes is False:
        setting: int | str | None = None
    elif min_size_bytes == AUTO or (type(min_size_bytes) is int and min_size_bytes >= 0):
        setting = min_size_bytes
    else:
        raise ArgumentError(
            f"{call}: min_size_bytes: got {shown(min_size_bytes)}; expected 0 or more bytes, 'auto', or False"
        )
    if arguments.enter(call, group) is not None:
        backend, what = bare_backend().during(call), f"{call}({setting!r})"
        Agreement(backend, group, what, subject="hierarchical collectives, which stay as they were").check()
        set_setting(setting, group)
