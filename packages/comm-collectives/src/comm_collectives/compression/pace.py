"""Tell slow links by how long earlier calls waited for what they exchanged."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

__all__ = ["is_slow", "note"]

# Where a link is faster, the processor's time counts, and less of it is spent where a thread of the library sends.
_SLOW_BYTES_PER_S = 250e6
# What is smaller says little.
_LEAST_BYTES = 1 << 20


class _Known:
    world: ClassVar[bool] = False
    groups: ClassVar[WeakKeyDictionary[ProcessGroup, bool]] = WeakKeyDictionary()


def is_slow(group: ProcessGroup | None) -> bool:
    """Return whether the link of ``group`` was slow in the last call that could tell; False where none has."""
    return _Known.world if group is None else _Known.groups.get(group, False)


def note(group: ProcessGroup | None, received_bytes: int, waited_s: float, took_s: float) -> None:
    """Note what a call received, how long this rank has waited for it, and how long the call took.

    A call that computes for most of its time says nothing of a slow link, and waits for little on any.
    """
    if received_bytes < _LEAST_BYTES:
        return
    if waited_s * _SLOW_BYTES_PER_S > received_bytes:
        slow = True
    elif took_s * _SLOW_BYTES_PER_S < received_bytes:
        slow = False
    else:
        return
    if group is None:
        _Known.world = slow
    else:
        _Known.groups[group] = slow
