"""A compressed call that fails on one rank, in its codec or for want of memory."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from comm_utils.backend import Backend
from comm_utils.errors import BrokenGroupError, CollectiveMismatchError
from comm_utils.group_names import name_of
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = ["broken"]


def broken(
    call: str, backend: Backend, group: ProcessGroup | None, compression: object, error: Exception
) -> BrokenGroupError:
    """Return what to raise from ``error``; the group is broken, and the other ranks learn the cause."""
    rank, what = backend.get_rank(), f"the compression {compression!r} raised {type(error).__name__}: {error}"
    pg: Any = backend.get_world_group() if group is None else group
    backend.mark_broken(group, f"{call}: {what}")
    failure = BrokenGroupError(f"{call}: {what}. The group cannot be used any more, as other ranks may have gone on")
    # To the others, this rank's calls are no longer those that theirs belong to.
    trouble = Trouble(CollectiveMismatchError, f"rank {rank} gave up in {call}, as {what}", (rank,))
    WATCH.tell(name_of(pg), failure, trouble)
    return failure
