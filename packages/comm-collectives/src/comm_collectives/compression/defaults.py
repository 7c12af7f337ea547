"""The compression of calls that do not say it themselves, by group."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from comm_collectives.compression.settings import Compression, forget_states
from comm_utils.active import slot

__all__ = ["default_of", "forget_defaults", "no_default", "set_default"]


class _Defaults:
    world: ClassVar[Compression | None] = None
    groups: ClassVar[WeakKeyDictionary[ProcessGroup, Compression | None]] = WeakKeyDictionary()


def set_default(compression: Compression | None, group: ProcessGroup | None) -> None:
    """Compress calls on ``group`` that say nothing about it; None as the group is for all without their own."""
    if group is None:
        _Defaults.world = compression
    else:
        _Defaults.groups[group] = compression
    slot.fast_paths.clear()  # those of calls that are compressed from now on


def forget_defaults() -> None:
    """Compress nothing in the world to come."""
    _Defaults.world = None
    _Defaults.groups.clear()
    forget_states()


def default_of(group: ProcessGroup | None) -> Compression | None:
    """Return what compresses calls on ``group``; None for nothing."""
    return _Defaults.world if group is None else _Defaults.groups.get(group, _Defaults.world)


def no_default(group: ProcessGroup | None) -> str | None:
    """Return the ``compression`` of a call on ``group`` that is to travel as it is, whatever the default.

    Returns:
        None where there is no default, as a fast path serves only calls that say nothing.
    """
    return None if default_of(group) is None else "none"
