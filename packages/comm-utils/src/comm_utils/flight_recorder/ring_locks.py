"""Locks of rings: a process locks its ring for as long as it lives, and others find out whether it is locked.

The kernel keeps the lock (``flock``) and releases it when the process has ended, also by SIGKILL. It counts across the
pid namespaces of a host, where no process can look for another one by its pid.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["is_at", "lock_as_owner", "lock_as_reader"]


def lock_as_owner(descriptor: int) -> bool | None:
    """Lock a ring for its process alone, until the descriptor is closed; see :func:`_lock`."""
    return _lock(descriptor, alone=True)


def lock_as_reader(descriptor: int) -> bool | None:
    """Lock a ring that no process owns, until the descriptor is closed; see :func:`_lock`.

    Readers share the lock. While one has it, no process takes the file for its ring.
    """
    return _lock(descriptor, alone=False)


def _lock(descriptor: int, alone: bool) -> bool | None:
    """Return True with the lock, False where another process has it, and None where this file system has no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still names the file."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False
