"""The fast paths of a backend: one callable for each operation, op or root, and group that was checked in full once.

A synchronous fast path takes the tensor arguments of the call as the user gives them (lists and split sizes included),
validates them itself, does the whole operation and returns True; or it returns False, having done nothing, and the call
takes the checked path. An asynchronous one returns the :class:`comm_utils.backend.Work`, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FastPath", "FastPathCache", "FastPathKey"]

#: See the module's docstring; returns a bool, or for an asynchronous call ``Work | None``.
FastPath: TypeAlias = "Callable[..., Any]"

#: The name of the call; the op of a reduction, the root as the caller gave it (``src`` or ``dst``, a global rank, None
#: for the default), ``(dst, op)`` of a reduce, else None; the group, None for the world group.
FastPathKey: TypeAlias = "tuple[str, object, ProcessGroup | None]"


class FastPathCache:
    """The fast paths of one backend, shared by its views and its wrappers.

    The backend empties it when a group ends or breaks.

    Attributes:
        synchronous: fast paths of calls that return when the operation is complete.
        asynchronous: fast paths of calls with ``async_op=True``.
        emptied: how often it was emptied.
    """

    __slots__ = ("_memos", "asynchronous", "emptied", "synchronous")

    def __init__(self) -> None:
        self.synchronous: dict[FastPathKey, FastPath] = {}
        self.asynchronous: dict[FastPathKey, FastPath] = {}
        self._memos: dict[str, dict[Any, Any]] = {}
        self.emptied = 0

    def keep(self, key: FastPathKey, async_op: bool, make: Callable[[], FastPath]) -> None:
        """Keep the fast path that ``make`` returns, unless the cache is emptied meanwhile."""
        emptied, fast_paths = self.emptied, self.asynchronous if async_op else self.synchronous
        fast_paths[key] = make()
        if self.emptied != emptied:  # the group may have broken since it was asked for one
            fast_paths.pop(key, None)

    @property
    def collects_here(self) -> bool:
        """Return whether calls of this thread are collected, to be made together later."""
        return False

    def memo(self, name: str) -> dict[Any, Any]:
        """Return the dictionary ``name``, where a wrapper keeps what it knows of calls until the cache is emptied."""
        return self._memos.setdefault(name, {})

    def clear(self) -> None:
        """Forget everything: each call is checked in full once more."""
        self.emptied += 1  # first, for keep()
        # Emptied, not replaced: the head of every collective, and every wrapper, holds these dictionaries.
        self.synchronous.clear()
        self.asynchronous.clear()
        for memo in self._memos.values():
            memo.clear()
