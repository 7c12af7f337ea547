"""The processes of a group's ranks, those of this host, and the detection of their end."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from comm_utils.host_identity import host_identity, host_name
from comm_utils.log import logger
from comm_utils.process_locks import ProcessLock
from comm_utils.process_state import is_ending

__all__ = ["Peers", "Process", "this_process"]


@dataclass(frozen=True)
class Process:
    """One rank's process.

    Attributes:
        host: its name, for messages.
        machine: the same for processes that see each other's pids, and for no others.
    """

    host: str
    machine: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> Process:
    """Return the process that calls this."""
    try:
        machine = host_identity("pid", "net")  # containers of one machine may not see each other's processes
    except OSError:  # without /proc it is not known who sees whom
        machine = f"{host_name()} {os.getpid()} {uuid4().hex}"
    return Process(host_name(), machine, os.getpid())


class _Descriptor:
    """A descriptor of one process, which all groups of this process use that the other one is in."""

    turn = ProcessLock(threading.Lock)
    #: By pid.
    held: ClassVar[dict[int, _Descriptor]] = {}
    is_missed = False

    def __init__(self, pid: int) -> None:
        self.pid, self.number, self.users = pid, os.pidfd_open(pid), 0

    @classmethod
    def hold(cls, pid: int) -> _Descriptor | None:
        """Return the descriptor of a process, which the caller releases; None where none can be had.

        Raises:
            ProcessLookupError: there is no such process.
        """
        with cls.turn.lock:
            found = cls.held.get(pid)
            try:
                if found is None or found._has_ended():  # after which another process may get the pid
                    found = cls.held[pid] = cls(pid)
            except ProcessLookupError:
                raise
            except OSError as error:  # a kernel before 5.3, or none to spare: timeouts still tell
                if not cls.is_missed:
                    cls.is_missed = True
                    logger.warning(
                        "groups see the end of process %d, and maybe of others, only at the timeout: the system gives "
                        "no descriptor of it (%s)",
                        pid,
                        error,
                    )
                return None
            found.users += 1
            return found

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.number, select.POLLIN)
        return bool(poll.poll(0))

    def release(self) -> None:
        with self.turn.lock:
            self.users -= 1
            if self.users == 0:
                os.close(self.number)
                if self.held.get(self.pid) is self:
                    del self.held[self.pid]


class Peers:
    """The other ranks on this host, each watched by a descriptor that becomes readable when its process ends."""

    def __init__(self, processes: Sequence[Process], rank: int) -> None:
        self.processes = tuple(processes)
        mine = processes[rank]
        self.local = [index for index, process in enumerate(processes) if process.machine == mine.machine]
        self._watched: dict[int, int] = {}
        self._descriptors: list[_Descriptor] = []
        self._poll = select.poll()
        self._gone: set[int] = set()
        self._lock = threading.Lock()
        for index in self.local:
            if index == rank:
                continue
            try:
                descriptor = _Descriptor.hold(processes[index].pid)
            except ProcessLookupError:
                self._gone.add(index)
                continue
            if descriptor is not None:
                self._descriptors.append(descriptor)
                self._watched[descriptor.number] = index
                self._poll.register(descriptor.number, select.POLLIN)

    def gone(self) -> set[int]:
        """Positions in the group of ranks whose process has ended, as far as this host can see."""
        with self._lock:  # a poll object serves one thread at a time
            for descriptor, _ in self._poll.poll(0):
                self._gone.add(self._watched[descriptor])
                self._poll.unregister(descriptor)
        return self._gone

    def any_ending(self) -> bool:
        """Return whether a rank on this host is on its way out: its connections may close long before it has gone."""
        return any(index not in self._gone and is_ending(self.processes[index].pid) for index in self._watched.values())

    def close(self) -> None:
        with self._lock:
            for descriptor in self._watched:
                with suppress(KeyError):
                    self._poll.unregister(descriptor)
            self._watched.clear()
            for one in self._descriptors:
                one.release()
            self._descriptors.clear()
