"""The rings of the other ranks of this host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from comm_utils.flight_recorder.calls import RingHeader
from comm_utils.flight_recorder.directory import rings_in
from comm_utils.flight_recorder.reader import RingError, RingReader, open_ring
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.log import logger
from comm_utils.process_descriptors import ProcessDescriptor
from comm_utils.process_limits import free_descriptors
from comm_utils.process_state import process_state, start_time

__all__ = ["LocalRanks"]

# While ranks may still start, the folder is listed at every look.
_START_S, _LIST_EVERY_S = 5.0, 0.5
# So many files the watch leaves to the program.
_PROGRAMS_DESCRIPTORS = 16


def _is_short_of(free_descriptors: int | None) -> bool:
    return free_descriptors is not None and free_descriptors <= _PROGRAMS_DESCRIPTORS


class LocalRanks:
    """Maps the rings in the folder of a job as they appear, and keeps those of ranks that have ended.

    Args:
        folder: of the job; None where this process has no ring.
        own: the ring of this process.
        world_size: so many ranks there may be.
        since_ns: rings that were opened before, by the monotonic clock, are those of an earlier world of this job.
    """

    def __init__(self, folder: Path | None, own: Path | None, world_size: int, since_ns: int = 0) -> None:
        self._folder, self._own, self._world_size, self._since_ns = folder, own, world_size, since_ns
        self._identity = own_identity()
        self._seen: set[Path] = set()
        self._next_listing, self._start_ends = 0.0, time.monotonic() + _START_S
        self._has_warned = False
        #: When the rings of all ranks that had one then were open, by ``time.perf_counter_ns()``.
        self.listed_ns = 0
        #: By global rank. Replaced, not changed, as the threads of the watch and of the program go through it.
        self.readers: Mapping[int, RingReader] = {}
        # Of the processes of these ranks, as far as there are any: they tell how a process has ended.
        self._descriptors: dict[int, ProcessDescriptor] = {}
        self._unheld: list[RingHeader] = []
        # A handler of a signal may come here as well.
        self._lock = threading.RLock()

    def refresh(self, now: bool = False) -> None:
        """Open rings that are new."""
        with self._lock:
            self._refresh(now)

    def _refresh(self, now: bool) -> None:
        begin_ns, monotonic = time.perf_counter_ns(), time.monotonic()
        if self._folder is None or len(self.readers) >= self._world_size - 1:
            self.listed_ns = begin_ns
            return
        if not now and monotonic < self._next_listing:
            return
        self._next_listing = 0.0 if monotonic < self._start_ends else monotonic + _LIST_EVERY_S
        with suppress(OSError):
            for path in rings_in(self._folder):
                if path != self._own and path not in self._seen:
                    if self._needs_descriptors():
                        break
                    self._open(path)
            self.listed_ns = begin_ns
        self._hold_processes()

    def _needs_descriptors(self) -> bool:
        """Return whether the program needs the descriptors that are left, which is warned of once."""
        free = free_descriptors()
        if not _is_short_of(free):
            return False
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the watch leaves out ranks of this host: this process can open %d more files, and the program may "
                "need them; the calls of these ranks are not compared with those of this rank: raise the limit before "
                "the start (ulimit -n 4096, or LimitNOFILE= of a service)",
                free,
            )
        return True

    def _open(self, path: Path) -> None:
        try:
            reader = open_ring(path, os.geteuid())
        except RingError:  # it may not be written in full yet
            return
        except PermissionError as error:
            self._seen.add(path)
            logger.warning(
                "the watch leaves out a file in the flight recorder's folder (%s): its calls are not compared with "
                "those of this rank; remove it, or set flight_recorder.directory to a folder of this user alone",
                error,
            )
            return
        except OSError:
            return
        if not reader.header.identity:  # neither is its first entry
            reader.close()
            return
        self._seen.add(path)
        header, known = reader.header, self.readers.get(reader.header.rank)
        is_of_this_world = header.identity == self._identity and header.monotonic_ns >= self._since_ns
        if is_of_this_world and (known is None or known.header.wall_ns < header.wall_ns):
            self.readers = {**self.readers, header.rank: reader}
            self._unheld.append(header)
        else:
            reader.close()

    def _hold_processes(self) -> None:
        """Hold the processes of new rings, as long as there are descriptors to spare: rings come first."""
        headers, self._unheld = self._unheld, []
        for header in headers:
            earlier = self._descriptors.pop(header.rank, None)
            if earlier is not None:
                earlier.release()
            if not _is_short_of(free_descriptors()):
                self._hold(header)

    def _hold(self, header: RingHeader) -> None:
        with suppress(OSError, OverflowError):  # it has gone, none can be had, or the ring is damaged
            descriptor = ProcessDescriptor.hold(header.pid)
            if start_time(header.pid) == header.started:
                self._descriptors[header.rank] = descriptor
            else:  # of a process that has its number by now
                descriptor.release()

    def snapshots(self, recent: int = 256) -> dict[int, RankSnapshot]:
        """Return what these ranks do now, by global rank; rings that are damaged are left out."""
        found = {}
        for rank, reader in self.readers.items():
            with suppress(RingError, ValueError):  # closed meanwhile
                found[rank] = take_snapshot(reader, recent=recent, descriptor=self._descriptors.get(rank))
        return found

    def state_of(self, rank: int) -> str:
        """Return the state of a rank's process.

        Returns:
            ``"running"``, ``"stopped"``, ``"ended"``, ``"replaced"`` (by another program), ``"left"`` (it runs, and has
            ended communication) or ``"unknown"``.
        """
        reader = self.readers.get(rank)
        if reader is None:
            return "unknown"
        state = process_state(*reader.header.process)
        return "left" if state != "ended" and reader.word("state") in (1, 2) else state

    def await_listing(self, since_ns: int, limit_s: float) -> None:
        """Wait until the ranks that run have looked for rings since then, by the monotonic clock."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            late = [rank for rank, reader in self.readers.items() if reader.word("listed_at") < since_ns]
            if not any(self.state_of(rank) == "running" for rank in late):
                return
            time.sleep(0.002)

    def close(self) -> None:
        """Unmap all."""
        with self._lock:
            readers, self.readers = self.readers, {}
            descriptors, self._descriptors = self._descriptors, {}
        for reader in readers.values():
            reader.close()
        for descriptor in descriptors.values():
            descriptor.release()
