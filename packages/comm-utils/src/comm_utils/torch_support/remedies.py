"""The remedy after a group failed, in the errors of all backends."""

from __future__ import annotations

from torch.distributed import distributed_c10d as internals

from comm_utils.active import has_orchestrator, how_to_initialize
from comm_utils.watch.watch import WATCH

__all__ = ["OF_GROUP", "how_to_set_timeout", "of_world", "remedy", "without_remedy"]

OF_GROUP = "its members go on with destroy_process_group(group) and a new one from new_group()"


def of_world() -> str:
    """Return the remedy for the world group, of the packages that are installed here."""
    if has_orchestrator():
        return "call destroy_process_group() and then init_distributed() again, on every rank"
    return f"on every rank, call destroy_process_group(), and then {how_to_initialize()} again"


def how_to_set_timeout(of_call: bool) -> str:
    """Return where the limit of a call that timed out comes from.

    Args:
        of_call: it is the call's own, not the group's.
    """
    if of_call:
        source = "this call"
    else:
        source = "init_distributed() and new_group()" if has_orchestrator() else "comm_utils.Setup() and new_group()"
    return f"timeout= of {source} sets the limit"


def remedy(group: str) -> str:
    """Return the remedy for a group; for one that was made for steps of calls, that of the group of these calls.

    Where the world has ended, so has the group.
    """
    world = internals._world.default_pg
    return of_world() if world is None or WATCH.whole(group) == world.group_name else OF_GROUP


def without_remedy(error: BaseException) -> str:
    """Return what an error says, to be quoted in another one, which has its own remedy."""
    return str(error).partition(". The group cannot be used any more: ")[0]
