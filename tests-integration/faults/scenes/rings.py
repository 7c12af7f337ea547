"""Where the ring of a rank lies."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["RING_FOLDER", "is_ring", "ring_of"]

#: Rings lie in a folder of this one by default.
RING_FOLDER = Path("/dev/shm")
_RING = "/comm-flight-"


def is_ring(path: str) -> bool:
    """Return whether a file or folder belongs to the recorder, which keeps it after a failure."""
    return _RING in path


def ring_of(pid: int) -> str:
    """Return the path of the ring that a process has mapped, or nothing."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line[73:].strip()
            # It has mapped those of the other ranks as well; only its own it may write.
            if path.startswith(f"{RING_FOLDER}/") and "w" in line.split()[1] and is_ring(path):
                return path
    return ""
