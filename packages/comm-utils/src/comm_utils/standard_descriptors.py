"""The descriptors 0 to 2, which belong to standard input, output and error even where a process has closed them."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["occupy"]


def occupy() -> None:
    """Open ``/dev/null`` as each of these descriptors that is closed.

    The next file that is opened would get it otherwise, such as shared memory or a connection, and what native code
    prints to standard output or error would be written there. So this comes before anything that keeps connections
    open; shared memory never uses these descriptors.
    """
    for descriptor in range(3):
        with suppress(OSError):  # there is no /dev/null, or no descriptor is left
            if not _is_open(descriptor):
                opened = os.open(os.devnull, os.O_RDWR)
                if opened == descriptor:
                    os.set_inheritable(descriptor, True)
                else:  # another thread has just opened a file
                    os.close(opened)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
