"""Ending the connections of one group of gloo, so that its calls fail at once instead of at their timeout.

gloo has no call for it. A shutdown of the group's sockets is what gloo sees when a peer ends. The group's are, of those
that this process opened while it created the group, one that listens, what was accepted there, and the connections on
which ``SO_REUSEADDR`` is set, as gloo does and hardly anybody else: other threads open connections as well.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

__all__ = ["end_connections", "keep_in_memory", "opening_connections"]

_FILES = "/proc/self/fd"
_of_group: WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int], ...]] = WeakKeyDictionary()
_STREAM, _FAMILIES = socket.SOCK_STREAM, (socket.AF_INET, socket.AF_INET6)


def _sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of each socket of this process."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(_FILES):
            with suppress(OSError, ValueError):
                target = os.readlink(f"{_FILES}/{name}")
                if target.startswith("socket:["):
                    found.add((int(name), int(target[8:-1])))
    return found


class _Opened:
    """The sockets that were opened in a block."""

    def __init__(self) -> None:
        self.sockets: tuple[tuple[int, int], ...] = ()

    def belong_to(self, group: ProcessGroup) -> None:
        """Remember them as those of ``group``."""
        _of_group[group] = self.sockets


@contextmanager
def opening_connections() -> Iterator[_Opened]:
    """Note the sockets that the block opens."""
    before, opened = _sockets(), _Opened()
    yield opened
    opened.sockets = tuple(sorted(_sockets() - before))


def end_connections(group: ProcessGroup) -> int:
    """Shut down the connections that were opened for ``group``; return how many there were."""
    new = _of_group.pop(group, ())
    if not new:
        return 0
    ports = {port for one in new if (port := _listening_port(*one)) is not None}
    now = sorted(_sockets())
    listening = {port for one in now if (port := _listening_port(*one)) is not None}
    ended = 0
    for descriptor, inode in now:
        local = _local_port(descriptor)
        # A connection that a peer opened may have been accepted later.
        if local in ports or ((descriptor, inode) in new and local not in listening and _reuses_address(descriptor)):
            ended += _shut_down(descriptor, inode)
    return ended


def keep_in_memory(group: ProcessGroup) -> None:
    """Keep ``group`` until the process ends: its destructor would wait for a thread that does not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _opened(descriptor: int, inode: int) -> socket.socket | None:
    """Return another descriptor of a TCP socket; None where the number is another file's by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    with suppress(OSError):
        if inode in (0, os.fstat(copy).st_ino):
            found = socket.socket(fileno=copy)
            if found.type == _STREAM and found.family in _FAMILIES:
                return found
            found.close()
            return None
    os.close(copy)
    return None


def _listening_port(descriptor: int, inode: int) -> int | None:
    found = _opened(descriptor, inode)
    if found is None:
        return None
    with found, suppress(OSError):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(found.getsockname()[1])
    return None


def _local_port(descriptor: int) -> int | None:
    found = _opened(descriptor, 0)
    if found is None:
        return None
    with found, suppress(OSError):
        return int(found.getsockname()[1])
    return None


def _reuses_address(descriptor: int) -> bool:
    found = _opened(descriptor, 0)
    if found is None:
        return False
    with found, suppress(OSError):
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
    return False


def _shut_down(descriptor: int, inode: int) -> bool:
    found = _opened(descriptor, inode)
    if found is None:
        return False
    with found, suppress(OSError):  # one that listens is not connected
        found.getpeername()
        found.shutdown(socket.SHUT_RDWR)
        return True
    return False
