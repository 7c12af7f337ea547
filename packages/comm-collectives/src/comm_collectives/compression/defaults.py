"""The compression of calls that do not say it themselves, by group."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from comm_collectives.by_group import GroupSettings
from comm_collectives.compression.settings import Compression, forget_states

__all__ = ["default_of", "forget_defaults", "no_default", "set_default"]


_defaults: GroupSettings[Compression | None] = GroupSettings(None)


def set_default(compression: Compression | None, group: ProcessGroup | None) -> None:
    """Compress calls on ``group`` that say nothing about it; None as the group is for all without their own."""
    _defaults.set(compression, group)


def forget_defaults() -> None:
    """Compress nothing in the world to come."""
    _defaults.forget()
    forget_states()


def default_of(group: ProcessGroup | None) -> Compression | None:
    """Return what compresses calls on ``group``; None for nothing."""
    return _defaults.of(group)


def no_default(group: ProcessGroup | None) -> str | None:
    """Return the ``compression`` of a call on ``group`` that is to travel as it is, whatever the default.

    Returns:
        None where there is no default: only calls that say nothing go into a graph of ``torch.compile``.
    """
    return None if default_of(group) is None else "none"
