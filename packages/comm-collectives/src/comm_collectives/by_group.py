"""Values by group, of which programs name the world by None or by its process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch.distributed import GroupMember, ProcessGroup

from comm_utils.active import slot

__all__ = ["GroupRecords", "GroupSettings"]

T = TypeVar("T")


def _other_than_world(group: ProcessGroup | None) -> ProcessGroup | None:
    return None if group is GroupMember.WORLD else group


class GroupSettings(Generic[T]):
    """A setting for each group; that of the world serves groups without one of their own.

    Args:
        initial: the world's, until it is set.
    """

    def __init__(self, initial: T) -> None:
        self._initial = self._world = initial
        self._groups: WeakKeyDictionary[ProcessGroup, T] = WeakKeyDictionary()

    def of(self, group: ProcessGroup | None) -> T:
        """Return the setting of ``group``."""
        group = _other_than_world(group)
        return self._world if group is None else self._groups.get(group, self._world)

    def set(self, value: T, group: ProcessGroup | None) -> None:
        """Set ``value`` for ``group``."""
        group = _other_than_world(group)
        if group is None:
            self._world = value
        else:
            self._groups[group] = value
        slot.fast_paths.clear()  # those of calls that are made otherwise from now on

    def forget(self) -> None:
        """Begin a world to come with the initial setting."""
        self._world = self._initial
        self._groups.clear()


class GroupRecords(Generic[T]):
    """A record of each group, which begins as what ``make`` returns."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._world = make, make()
        self._groups: WeakKeyDictionary[ProcessGroup, T] = WeakKeyDictionary()

    def of(self, group: ProcessGroup | None) -> T:
        """Return the record of ``group``."""
        group = _other_than_world(group)
        if group is None:
            return self._world
        found = self._groups.get(group)
        return self._groups.setdefault(group, self._make()) if found is None else found

    def forget(self) -> None:
        """Begin anew in a world to come."""
        self._world = self._make()
        self._groups.clear()
