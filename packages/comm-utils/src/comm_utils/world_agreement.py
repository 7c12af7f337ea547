"""Tell the ranks that agree in a store to make a world that this one does not come; needs no torch."""

from __future__ import annotations

from contextlib import suppress

from comm_utils import threads
from comm_utils.backend import Setup

__all__ = ["LEFT", "WORLD", "leave_world"]

#: The key under which the ranks of a world on gloo agree to make it.
WORLD = "comm-world"
#: The beginning of what a rank says that does not come.
LEFT = "left "
# A rank that gives up waits no longer for the store.
_LEAVE_S = 2.0


def leave_world(setup: Setup, error: BaseException) -> None:
    """Let the ranks that wait for this one to make a world on gloo hear that it does not come, because of ``error``."""
    if setup.world_size == 1:
        return
    said = f"{LEFT}rank {setup.rank} gave up before it made the world: {type(error).__name__}: {error}"
    with suppress(RuntimeError, MemoryError):  # the store may have gone, and there may be no thread
        threads.with_limit(
            lambda: setup.store.compare_set(f"{WORLD}/{setup.rank}", "", said), _LEAVE_S, "comm-store-question"
        )
