"""Clean-up of shared memory that killed ranks left behind."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

__all__ = ["sweep"]

# libfabric's transport through shared memory names its files by process, endpoint and a counter.
_NAME = re.compile(r"(\d+):\d+:\d+")
_IN_NAMESPACES = re.compile(r"^NSpid:(.*)$", re.MULTILINE)


# Of the kernel's include/linux/proc_ns.h: the first pid namespace of a host, from which all its processes are seen.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


def sweep(folder: Path = Path("/dev/shm"), ending: bool = False) -> None:
    """Remove this user's files of libfabric's whose process has ended.

    A container that shares the folder may have pids of its own, and libfabric names its files by those. So only a
    process that sees all those of the host removes files of others.

    Args:
        ending: so has this process, as good as.
    """
    with suppress(OSError):
        named = [(path, int(found[1])) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]
        living = _living_pids() if named else None  # read after the files: they may be of processes that just began
        for path, pid in named:
            if (ending and pid == os.getpid()) or (living is not None and pid not in living):
                with suppress(OSError):
                    if path.stat().st_uid == os.getuid():
                        path.unlink()


def _living_pids() -> set[int] | None:
    """Return the pids of all processes of the host, in their own namespaces, too; None where not all can be seen."""
    found = set()
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
            return None
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                found.add(int(folder.name))
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's
                    status = (folder / "status").read_text(errors="replace")
                    found.update(int(pid) for line in _IN_NAMESPACES.findall(status) for pid in line.split())
    except OSError:
        return None
    return found
