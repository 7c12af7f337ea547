"""Find out whether a write to a stream would wait for a reader, who may never come."""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import Any

if sys.platform == "linux":
    import fcntl
    import termios

__all__ = ["would_block"]

# What a write may need beside its bytes, as a pipe keeps pages.
_SPARE_BYTES = 2 * 4096


def would_block(stream: Any, size_bytes: int) -> bool:
    """Return whether to write so many bytes to ``stream`` would block now; False where nobody can tell."""
    try:
        descriptor = stream.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(0):
            return True
        if sys.platform == "linux" and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            unread = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
            return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) - unread < size_bytes + _SPARE_BYTES
    except (AttributeError, OSError, TypeError, ValueError):  # no file, or none that can be asked
        return False
    return False
