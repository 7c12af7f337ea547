"""The processes of a group's ranks, those of this host, and the detection of their end."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from comm_utils.host_identity import host_identity, host_name
from comm_utils.log import logger
from comm_utils.process_descriptors import ProcessDescriptor
from comm_utils.process_state import describe_end, is_ending

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


class Peers:
    """The other ranks on this host, each watched by a descriptor that becomes readable when its process ends."""

    _has_warned = False

    def __init__(self, processes: Sequence[Process], rank: int) -> None:
        self.processes = tuple(processes)
        mine = processes[rank]
        self.local = [index for index, process in enumerate(processes) if process.machine == mine.machine]
        self._descriptors: dict[int, ProcessDescriptor] = {}  # by position
        self._watched: dict[int, int] = {}  # positions by descriptor
        self._poll = select.poll()
        self._gone: set[int] = set()
        self._lock = threading.Lock()
        for index in self.local:
            if index == rank:
                continue
            try:
                descriptor = ProcessDescriptor.hold(processes[index].pid)
            except ProcessLookupError:
                self._gone.add(index)
                continue
            except OSError as error:  # timeouts still tell
                self._warn_once(processes[index], error)
                continue
            self._descriptors[index] = descriptor
            self._watched[descriptor.number] = index
            self._poll.register(descriptor.number, select.POLLIN)

    @classmethod
    def _warn_once(cls, process: Process, error: OSError) -> None:
        if not cls._has_warned:
            cls._has_warned = True
            logger.warning(
                "groups see the end of process %d, and maybe of others, only at the timeout: the system gives no "
                "descriptor of it (%s)",
                process.pid,
                error,
            )

    def gone(self) -> set[int]:
        """Positions in the group of ranks whose process has ended, as far as this host can see."""
        with self._lock:  # a poll object serves one thread at a time
            for descriptor, _ in self._poll.poll(0):
                self._gone.add(self._watched[descriptor])
                self._poll.unregister(descriptor)
        return self._gone

    def describe_end(self, index: int) -> str:
        """Return how the process at a position has ended, as ``" by SIGKILL"``; "" where that is not known."""
        with self._lock:
            descriptor = self._descriptors.get(index)
            status = None if descriptor is None else descriptor.wait_status()
        return "" if status is None else f" {describe_end(status)}"

    def any_ending(self) -> bool:
        """Return whether a rank on this host is on its way out: its connections may close long before it has gone."""
        return any(index not in self._gone and is_ending(self.processes[index].pid) for index in self._watched.values())

    def close(self) -> None:
        with self._lock:
            for descriptor in self._watched:
                with suppress(KeyError):
                    self._poll.unregister(descriptor)
            self._watched.clear()
            for one in self._descriptors.values():
                one.release()
            self._descriptors.clear()
