"""The state of a process of this host: alive, stopped, ended."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_alive", "process_state", "start_time"]


_HAS_PROC = Path("/proc/self/stat").exists()


def _fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the third, the state, on; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_time(pid: int | None = None) -> int:
    """Return when a process began, in clock ticks since boot, which tells apart processes that had the same pid.

    0 where that is not known.
    """
    fields = _fields(os.getpid() if pid is None else pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def process_state(pid: int, started: int = 0) -> str:
    """Return ``"running"``, ``"stopped"``, ``"ended"`` or, where this system does not tell, ``"unknown"``.

    Args:
        started: :func:`start_time` of the process that is meant; 0 is any with this pid.
    """
    if not _HAS_PROC:
        return "unknown"
    fields = _fields(pid)
    if not fields or fields[0] in "ZX" or (started and len(fields) > 19 and int(fields[19]) != started):
        return "ended"
    return "stopped" if fields[0] in "Tt" else "running"


def is_alive(pid: int, started: int = 0) -> bool:
    """Return whether the process has not ended; it may be stopped."""
    return process_state(pid, started) != "ended"
