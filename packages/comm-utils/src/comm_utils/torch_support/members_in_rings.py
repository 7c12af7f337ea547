"""The ranks by which rings of the flight recorder name the members of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as internals

__all__ = ["ranks_in_rings"]


def ranks_in_rings(name: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ``ranks``; none where other code has made the group on a store of its own, across several worlds.

    The global ranks of such a group, as of a trainer and the servers that get its weights, are numbers of no world.
    The watch would take its members for the processes that have these ranks in the world of this one.

    Args:
        name: of the group.
        ranks: global ranks of its members, as torch has them.
    """
    groups, world = internals._world.pg_map, internals._world.default_pg
    try:
        group: Any = internals._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # it is being made, or ended
        return tuple(ranks)
    if world is None or group not in groups:
        return tuple(ranks)
    own, of_world = _root(groups[group][1]), _root(groups[world][1])
    return tuple(ranks) if own is of_world else ()


def _root(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
