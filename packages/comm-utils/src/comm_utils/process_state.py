"""The state of a process of this host: running, stopped, ended, or with another program."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = [
    "GONE",
    "debugger_of",
    "describe_end",
    "is_alive",
    "is_ending",
    "process_image",
    "process_state",
    "signal_name",
    "start_time",
    "wait_status",
]

#: The states of a process that does nothing more of what it did.
GONE = frozenset({"ended", "replaced"})

# Of the kernel's include/linux/sched.h.
_PF_EXITING = 0x4
_HAS_PROC = Path("/proc/self/stat").exists()


def _fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the third, the state, on; None where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    """Return whether there is such a process, also where ``/proc`` does not show it to this user (``hidepid``)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def start_time(pid: int | None = None) -> int:
    """Return when a process began, in clock ticks since boot, which tells apart processes that had the same pid.

    0 where that is not known.
    """
    fields = _fields(os.getpid() if pid is None else pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def process_image() -> int:
    """Return a number for the program that this process runs, which tells it from the next one after ``exec``.

    0 where that is not known.
    """
    return _image(_fields(os.getpid()))


def _image(fields: list[str] | None) -> int:
    """Return where the stack begins, in units of 16 bytes: the kernel places it anew, at random, for each program.

    Processes that may not look into this one read 0.
    """
    return int(fields[25]) >> 4 & 0xFFFFFFFF if fields and len(fields) > 25 else 0


def process_state(pid: int, started: int = 0, image: int = 0) -> str:
    """Return ``"running"``, ``"stopped"``, ``"ended"``, ``"replaced"`` or, where that is not known, ``"unknown"``.

    A process is replaced when it has started another program in its place (``os.execv``).

    Args:
        started: :func:`start_time` of the process that is meant; 0 is any with this pid.
        image: its :func:`process_image`; 0 is any.
    """
    if not _HAS_PROC:
        return "unknown"
    fields = _fields(pid)
    if fields is None and _exists(pid):
        return "unknown"
    if not fields or fields[0] in "ZX" or (started and len(fields) > 19 and int(fields[19]) != started):
        return "ended"
    if image and _image(fields) not in (0, image):
        return "replaced"
    return "stopped" if fields[0] in "Tt" else "running"


def is_alive(pid: int) -> bool:
    """Return whether the process runs its program; it may be stopped."""
    return process_state(pid) not in GONE


def wait_status(pid: int, started: int = 0) -> int | None:
    """Return how a process has ended, in the form of ``os.waitpid``, until its parent waits for it; None later.

    Args:
        started: as for :func:`process_state`.
    """
    fields = _fields(pid)
    if not fields or fields[0] not in "ZX" or len(fields) < 50 or (started and int(fields[19]) != started):
        return None
    with suppress(OSError):  # its parent has waited for it just now
        # Other users may read 0, whatever it is.
        if fields[49] != "0" or os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            return int(fields[49])
    return None


def describe_end(status: int) -> str:
    """Return ``"by SIGKILL"`` or ``"with exit status 3"``, of what ``os.waitpid`` says of the end of a process."""
    return f"by {signal_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else f"with exit status {status >> 8}"


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def debugger_of(pid: int) -> str:
    """Return the debugger that holds a process, such as ``"gdb, pid 12"``; empty where none is known to."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        found = dict(line.partition(":")[::2] for line in lines)
        tracer = found.get("TracerPid", "0").strip()
        if found.get("State", "").split()[:1] == ["t"] and tracer != "0":
            return f"{Path(f'/proc/{tracer}/comm').read_text(errors='replace').strip()}, pid {tracer}"
    return ""


def is_ending(pid: int) -> bool:
    """Return whether the process is on its way out, or has ended, as far as this one can see."""
    fields = _fields(pid)
    return not _exists(pid) if fields is None else bool(int(fields[6]) & _PF_EXITING)
