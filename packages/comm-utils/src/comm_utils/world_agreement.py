"""Tell the ranks that agree in a store to make a world that this one does not come; needs no torch to be imported."""

from __future__ import annotations

from contextlib import suppress

from comm_utils.backend import Setup

__all__ = ["leave_world"]

# A rank that gives up asks no longer.
_LEAVE_S = 1.0


def leave_world(setup: Setup, error: BaseException) -> None:
    """Let the ranks that wait for this one to make a world on gloo hear that it does not come, because of ``error``.

    Rank 0, which may serve the store, waits for a few seconds until they have.
    """
    from comm_utils.torch_support.bounded_store import BoundedStore  # the selector loads without torch
    from comm_utils.torch_support.group_agreement import LEFT, WORLD, let_others_read
    from comm_utils.torch_support.initialization import agrees_in_store

    said = f"{LEFT}rank {setup.rank} gave up before it made the world: {type(error).__name__}: {error}"
    said = said.encode(errors="replace").decode()
    store = BoundedStore(setup.store, f"init_distributed: rank {setup.rank}", _LEAVE_S)
    key = f"{WORLD}/{setup.rank}"
    with suppress(RuntimeError):  # the store may have gone, or not answer
        if agrees_in_store(setup) and store.compare_set(key, "", said).decode() == said:
            let_others_read(store, WORLD, setup.rank, range(1, setup.world_size))
