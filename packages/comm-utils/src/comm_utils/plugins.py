"""Plugins: entry points of installed packages."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, distributions

__all__ = ["entry_points"]

_GROUPS = "comm_utils."


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group``.

    Read from disk once for every ``sys.path``, because reading takes a while.
    """
    return tuple(entry for entry in _read(tuple(sys.path)) if entry.group == group)


@functools.lru_cache(maxsize=4)
def _read(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    found: dict[str, list[EntryPoint]] = {}
    for distribution in distributions(path=list(path)):
        ours = [entry for entry in distribution.entry_points if entry.group.startswith(_GROUPS)]
        if ours:
            found.setdefault(distribution.metadata["Name"], ours)  # the first on the path is the one that is imported
    return tuple(entry for ours in found.values() for entry in ours)
