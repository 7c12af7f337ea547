"""The remedy after a group failed, in the errors of all backends."""

from __future__ import annotations

from torch.distributed import distributed_c10d as internals

from comm_utils.watch.watch import WATCH

__all__ = ["OF_GROUP", "OF_WORLD", "remedy", "without_remedy"]

OF_WORLD = "call destroy_process_group() and then init_distributed() again, on every rank"
OF_GROUP = "its members go on with destroy_process_group(group) and a new one from new_group()"


def remedy(group: str) -> str:
    """Return the remedy for a group; for one that was made for steps of calls, that of the group of these calls.

    Where the world has ended, so has the group.
    """
    world = internals._world.default_pg
    return OF_WORLD if world is None or WATCH.whole(group) == world.group_name else OF_GROUP


def without_remedy(error: BaseException) -> str:
    """Return what an error says, to be quoted in another one, which has its own remedy."""
    return str(error).partition(". The group cannot be used any more: ")[0]
