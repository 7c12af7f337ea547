"""Compression of all calls on a group."""

from __future__ import annotations

from comm_collectives import arguments
from comm_collectives.annotations import Compressing, Group
from comm_collectives.arguments import is_member
from comm_collectives.compression.defaults import set_default
from comm_collectives.compression.settings import as_compression
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils.errors import ArgumentError

__all__ = ["set_compression"]


@with_keyword_errors
def set_compression(compression: Compressing, group: Group = None) -> None:
    """Compress what collectives on ``group`` send, unless a call has a ``compression`` of its own.

    All ranks of the group call this alike. It concerns ``all_reduce``, ``reduce_scatter``, ``all_gather`` and
    ``all_to_all`` with lists and without, but not the ``*_coalesced`` calls. Calls that it cannot serve, for their
    dtype or op, travel as they are.

    Args:
        compression: a codec such as ``"int8"``, or a ``Compression``; None or ``"none"`` for none; ``"seq_parallel"``
            for what the configuration's ``seq_parallel_communication_data_type`` says.
        group: None for the world group and all groups that have none of their own.

    Raises:
        ArgumentError: no such codec; or a ``Compression`` with a name, which is that of one tensor.
    """
    call = "set_compression"
    arguments.active(call)
    found = as_compression(call, compression)
    if found is not None and found.name is not None:
        raise ArgumentError(
            f"{call}: compression: got one with the name {found.name!r}, which is that of one tensor, for all calls; "
            "expected one without a name: what is lost then belongs to the memory of each tensor"
        )
    if is_member(call, group):
        set_default(found, group)
