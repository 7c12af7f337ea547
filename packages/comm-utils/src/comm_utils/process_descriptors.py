"""Descriptors of other processes of this host, which tell when a process has ended, and how.

The kernel may give the number of a process that has ended to another one; a descriptor (``pidfd``) stays with the one
that it was opened for.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import threading
from contextlib import suppress
from typing import ClassVar

from comm_utils import process_state
from comm_utils.process_locks import ProcessLock

__all__ = ["ProcessDescriptor"]

# Of the kernel's include/uapi/linux/pidfd.h: struct pidfd_info in its first form, _IOWR(0xFF, 11, struct pidfd_info)
# and PIDFD_INFO_EXIT.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3


class ProcessDescriptor:
    """A descriptor of one process, which is shared by all parts of this process that hold it.

    Attributes:
        number: the descriptor; it becomes readable when the process ends.
    """

    # A handler of a signal may come here as well.
    _turn = ProcessLock(threading.RLock)
    _held: ClassVar[dict[int, ProcessDescriptor]] = {}

    def __init__(self, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.pid, self.number, self._users = pid, os.pidfd_open(pid), 0

    @classmethod
    def hold(cls, pid: int) -> ProcessDescriptor:
        """Return the descriptor of a process, which the caller releases.

        Raises:
            ProcessLookupError: there is no such process.
            OSError: none can be had: the kernel is older than 5.3, or this process has no descriptor to spare.
        """
        with cls._turn.lock:
            found = cls._held.get(pid)
            if found is None or found.has_ended():  # after which another process may get the pid
                found = cls._held[pid] = cls(pid)
            found._users += 1
            return found

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        poll = select.poll()
        poll.register(self.number, select.POLLIN)
        return bool(poll.poll(0))

    def wait_status(self) -> int | None:
        """Return how the process has ended, in the form of ``os.waitpid``; None where that is not known.

        It is known until the parent waits for the process; from Linux 6.15 on, also after that.
        """
        with self._turn.lock:
            if self._users == 0:
                return None
            # The kernel keeps it with the descriptor just before the process leaves /proc.
            found = self._kept_status()
            if found is None:
                found = process_state.wait_status(self.pid)
                if found is None or not self._is_in_proc():  # else of this process, and of no later one with its number
                    found = self._kept_status()
            return found

    def _is_in_proc(self) -> bool:
        """Return whether the parent has not waited for the process yet."""
        try:
            signal.pidfd_send_signal(self.number, 0)
        except ProcessLookupError:
            return False
        except OSError:  # of another user
            return True
        return True

    def _kept_status(self) -> int | None:
        import fcntl

        with suppress(OSError):  # an older kernel
            info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
            fcntl.ioctl(self.number, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _EXIT:
                return int(status)
        return None

    def release(self) -> None:
        """Hold it no longer; the last holder closes it."""
        with self._turn.lock:
            self._users -= 1
            if self._users == 0:
                os.close(self.number)
                if self._held.get(self.pid) is self:
                    del self._held[self.pid]
