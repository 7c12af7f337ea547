"""Files that other processes wrote, opened without waiting for anybody."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Return a descriptor of the file at ``path``, for reading.

    Args:
        flags: further ones of ``os.open``.

    Raises:
        OSError: it cannot be opened, or is no regular file: opening a FIFO would wait for its writer, and a device may
            never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    number, reason = (errno.EISDIR, os.strerror(errno.EISDIR)) if stat.S_ISDIR(mode) else _NOT_REGULAR
    raise OSError(number, reason, os.fspath(path))


_NOT_REGULAR = errno.EINVAL, "not a regular file"
