"""Record the calls of this process in its ring: the one object :data:`RECORDER`.

A backend describes a kind of call once (:meth:`FlightRecorder.kind`) and then records each call with two functions
that cost a few hundred nanoseconds: ``begin(elements)`` returns a number, ``end(number)`` notes the end. Before a
world exists, after it has ended, in forked children and where recording is turned off, they write to private memory,
so that callers need not ask.
"""

from __future__ import annotations

import atexit
import errno
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from comm_utils import operations
from comm_utils.flight_recorder.call_sites import CallSites
from comm_utils.flight_recorder.directory import (
    RingFile,
    create_folder,
    create_ring,
    default_directory,
    prune,
    remove_ring,
)
from comm_utils.flight_recorder.kinds import LANE_WORD, WAITED_FOR, Kind, Series, Uncounted, make_kind
from comm_utils.flight_recorder.layout import JOINED, LARGEST_RECORDS, NATIVE_KIND, EntryType, unpacked_kind
from comm_utils.flight_recorder.memory import RingMemory, ring_bytes
from comm_utils.flight_recorder.rank_ranges import packed_ranks
from comm_utils.flight_recorder.settings import FlightRecorderSettings
from comm_utils.flight_recorder.store_steps import is_step_of
from comm_utils.host_identity import host_name, process_space
from comm_utils.log import logger
from comm_utils.oom_kills import OOM_KILLS

__all__ = [
    "RECORDER",
    "WAITED_FOR",
    "FlightRecorder",
    "Kind",
    "Series",
    "own_identity",
]

_PRIVATE_RECORDS = 64
_OUR_THREADS = "comm-"
# So many are remembered: kinds of calls, and counters (of messages, one for each pair and tag).
_MOST_KINDS, _MOST_SERIES = 8192, 8192
# Entries are left out for so many groups at least, as all have to be read again then; those of the last calls stay, of
# fewer calls where these need too much room.
_LEAST_ENDED, _RECENT = 32, (128, 32, 8, 1)
_UNCOUNTED = Uncounted()


class FlightRecorder:
    """The recorder of one process; see the module.

    Attributes:
        path: of the ring of the current world; None without one.
        opened: how many rings were opened; a backend describes its groups and kinds anew after each.
        closed_ns: when the ring of the world before the current one was closed, by ``time.perf_counter_ns()``.
        settings: what the next :meth:`open` does.
    """

    def __init__(self) -> None:
        self.settings = FlightRecorderSettings()
        self.path: Path | None = None
        self.opened = 0
        self.closed_ns = 0
        # Descriptors of the ring's file; others see by the lock that this process lives.
        self._descriptor = self._file_lock = -1
        self._lock = threading.RLock()
        self._failed = False
        self._listeners: list[Callable[[int], None]] = []
        self._use(RingMemory(_PRIVATE_RECORDS, 0, 1, recorded=False))

    def _use(self, memory: RingMemory) -> None:
        self.numbers = count(1)
        self._groups: dict[str, int] = {}
        self._ended: dict[int, str] = {}  # groups whose entries may be left out, by index
        self._failures: dict[int, str] = {}  # groups of failures, by index
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._kind_entries: dict[tuple[Any, ...], int] = {}
        self._series: dict[tuple[Any, ...], Series] = {}
        self._call_sites = CallSites(memory, self._lock)
        self.sites = self._call_sites.known
        self._threads: set[int] = set()
        # Identifiers are used again, so an ended thread's may be that of one that has made no calls.
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._last_caller: weakref.ref[threading.Thread] | None = None
        self._counting = threading.Lock()
        #: Not empty once more than one thread has made calls.
        self.several_threads: list[int] = []
        # Last: after an interrupt, close() does all of it again.
        self._memory = memory
        self.opened += 1
        for listener in self._listeners:
            listener(memory.descriptor)

    # --- the ring

    @property
    def memory(self) -> RingMemory:
        """Return the memory in use."""
        return self._memory

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the ring's file, -1 where records go to private memory."""
        return self._descriptor

    def when_opened(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(descriptor)`` whenever the memory is another; -1 says that nothing is to be recorded."""
        self._listeners.append(listener)

    def open(self, rank: int, world_size: int, job: str) -> None:
        """Create the ring of this process for a new world; where that fails, warn and record to private memory.

        Args:
            job: the name of the folder, the same on all ranks.
        """
        with self._lock:
            self.close()
            if not self.settings.enabled:
                return
            OOM_KILLS.begin()
            try:
                self._open(rank, world_size, job)
            except BaseException:  # also of a handler of signals
                self.close()
                raise

    def _open(self, rank: int, world_size: int, job: str) -> None:
        settings = self.settings
        records = 1 << max(4, min(settings.records, LARGEST_RECORDS) - 1).bit_length()
        try:
            directory = default_directory() if settings.directory is None else Path(settings.directory)
            self.path, self._descriptor, self._file_lock = self._create_ring(directory, job, rank, ring_bytes(records))
        except OSError as error:
            logger.warning(
                "the flight recorder has no file (%s): the calls of rank %d are recorded in private memory, which "
                "other ranks and commctl postmortem cannot read; set flight_recorder.directory to a folder with "
                "%d KiB free for each rank",
                error,
                rank,
                ring_bytes(records) >> 10,
            )
        self._use(RingMemory(records, rank, world_size, self._descriptor))
        process = {
            "host": host_name(),
            "identity": own_identity(),
            "job": job,
            "python": platform.python_version(),
            "program": " ".join(sys.argv)[:400],
        }
        self._memory.add_entry(EntryType.PROCESS, process)

    def _create_ring(self, directory: Path, job: str, rank: int, size_bytes: int) -> RingFile:
        folder, is_new = create_folder(directory, job)
        if is_new:
            prune(directory, self.settings.keep, own_identity())
        try:
            return create_ring(folder, rank, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        prune(directory, 0, own_identity())
        folder, _ = create_folder(directory, job)
        return create_ring(folder, rank, size_bytes)

    def close(self) -> None:
        """End the world's records: the ring is removed, unless a call failed."""
        with self._lock:
            try:
                if self.path is not None:
                    self.closed_ns = time.perf_counter_ns()
                    self._memory.set_word("state", 2 if self._failed else 1)
                    if not self._failed and not self.settings.keep_clean:
                        remove_ring(self.path)
            finally:
                self.path, self._failed = None, False
                self._close_file()
            if self._memory.descriptor >= 0 or self._memory.records != _PRIVATE_RECORDS:
                self._use(RingMemory(_PRIVATE_RECORDS, 0, 1, recorded=False))

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        descriptor, self._file_lock = self._file_lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """Stop recording in a forked child; the ring is the parent's."""
        self.path, self._failed = None, False
        self._lock = threading.RLock()
        self._close_file()  # the parent's descriptor goes on locking it
        self._use(RingMemory(_PRIVATE_RECORDS, 0, 1, recorded=False))

    @property
    def has_failed(self) -> bool:
        """Return whether a call of this world has failed."""
        return self._failed

    # --- what is recorded

    def group_index(
        self, name: str, ranks: Sequence[int], description: str, backend: str, timeout_s: float | None = None
    ) -> int:
        """Return the index of a group, which is described at the first time.

        Args:
            name: the same on all members, and no other group's.
            ranks: global ranks, in the order of their group ranks.
            backend: what moves its data.
            timeout_s: of its calls; None is not known.
        """
        with self._lock:
            index = self._groups.get(name)
            if index is None:
                content = {
                    "name": name,
                    "ranks": packed_ranks(ranks),
                    "description": description,
                    "backend": backend,
                    "timeout_s": timeout_s,
                }
                self._make_room(content)
                index = self._memory.add_entry(EntryType.GROUP, content)
                if index:
                    self._groups[name] = index
            return index

    def end_group(self, name: str) -> None:
        """Note that a group makes no more calls: its description goes when room is needed for others'.

        So do those of its steps, and its failures.
        """
        with self._lock:
            for one in [one for one in self._groups if one == name or is_step_of(one, name)]:
                self._ended[self._groups.pop(one)] = one

    def _make_room(self, content: object) -> None:
        """Leave out the entries of groups that have ended, where little room is left for others, such as ``content``.

        Groups with recent calls stay, as a crash soon after the end of a group may be about it.
        """
        most, *fewer = _RECENT
        if len(self._ended) >= _LEAST_ENDED and self._memory.is_almost_full:
            self._leave_out_ended(most)
        for calls in fewer:
            if self._memory.has_room(EntryType.GROUP, content):
                return
            self._leave_out_ended(calls)

    def _leave_out_ended(self, calls: int) -> None:
        """Leave out the entries of groups that have ended, but for those of the last ``calls`` calls."""
        kinds = {index: dict(entry)["group"] for entry, index in self._kind_entries.items()}
        recent = {
            unpacked_kind(one)["group"] if one & NATIVE_KIND else kinds.get(one, 0)
            for one in self._memory.last_kinds(calls)
        }
        gone = self._ended.keys() - recent
        if not gone:
            return
        # A group that was made again has the same name.
        names = {self._ended[index] for index in gone} - self._groups.keys()
        failures = {index for index, name in self._failures.items() if name in names}
        gone_kinds = {index for index, group in kinds.items() if group in gone}
        self._memory.leave_out({EntryType.GROUP: gone, EntryType.KIND: gone_kinds, EntryType.FAILURE: failures})
        self._ended = {index: name for index, name in self._ended.items() if index not in gone}
        self._failures = {index: name for index, name in self._failures.items() if index not in failures}
        self._kind_entries = {entry: one for entry, one in self._kind_entries.items() if one not in gone_kinds}
        self._kinds = {key: one for key, one in self._kinds.items() if key[0] not in gone}
        self._series = {key: one for key, one in self._series.items() if key[0] not in gone}

    def kind(
        self,
        group: int,
        operation: str,
        call: str,
        dtype: str = "",
        op: str = "",
        root: int = -1,
        peer: int = -1,
        tag: int = 0,
        joined: int = 0,
    ) -> Kind:
        """Describe a kind of call.

        Args:
            group: from :meth:`group_index`.
            operation: of the table of operations.
            call: the call of the user's in whose course it is.
            root: a global rank; -1 has none.
            peer: of a message: a global rank; -1 is any, whose messages are not counted.
            joined: of a collective with several tensors in one: see :attr:`Call.joined`.
        """
        key = group, operation, call, dtype, op, root, peer, tag, joined
        found = self._kinds.get(key)
        if found is None:
            with self._lock:
                found = self._make_kind(group, operation, call, dtype, op, root, peer, tag, joined)
                if len(self._kinds) < _MOST_KINDS:
                    self._kinds[key] = found
        return found

    def _make_kind(
        self, group: int, operation: str, call: str, dtype: str, op: str, root: int, peer: int, tag: int, joined: int
    ) -> Kind:
        pattern = operations.get(operation).pattern
        is_message = pattern.is_message
        content: dict[str, Any] = {"operation": operation, "call": call, "dtype": dtype, "group": group}
        content |= {"op": op} if op else {}
        content |= {"root": root} if root >= 0 else {}
        content |= {"peer": peer} if is_message else {}
        tag_word = 0
        if is_message and 0 <= tag < 1 << 32:
            tag_word = tag << 32
        elif is_message:
            content["tag"] = tag
        elif joined:  # in each record, as an entry for every list of sizes would use up their memory
            tag_word = JOINED | joined
        entry = tuple(content.items())
        index = self._kind_entries.get(entry, 0)
        if not index:
            index = self._memory.add_entry(EntryType.KIND, content)
            if index:
                self._kind_entries[entry] = index
        series = self._series_of((group, operation, peer, tag) if is_message else (group,))
        agreed: object = dtype if is_message else (operation, dtype, op, root)
        if joined:
            agreed = agreed, joined
        return make_kind(self, series, index, agreed, bool(op) or not pattern.uneven, tag_word)

    def _series_of(self, key: tuple[Any, ...]) -> Series:
        """Return the counter of some calls; those of the latest ones of very many pairs and tags count nothing."""
        found = self._series.get(key)
        if found is None:
            if len(key) > 1 and len(self._series) >= _MOST_SERIES:
                return _UNCOUNTED
            found = self._series[key] = Series()
        return found

    def note_thread(self) -> None:
        """Count the calling thread among those that make calls, unless it does so on behalf of a call of another."""
        thread = threading.current_thread()
        if thread.name.startswith(_OUR_THREADS):
            return
        self._threads.add(threading.get_ident())
        self._callers.add(thread)
        self._last_caller = weakref.ref(thread)
        self._memory.set_word("threads", max(len(self._threads), self._memory.word("threads")))
        if len(self._threads) > 1 and not self.several_threads:
            self.several_threads.append(1)

    def has_called(self, thread: threading.Thread) -> bool:
        """Return whether a thread has made calls in this world."""
        return thread in self._callers

    @property
    def last_caller(self) -> threading.Thread | None:
        """Return the thread that :meth:`note_thread` saw last; None where there is none, or it has gone."""
        return None if self._last_caller is None else self._last_caller()

    def raise_count(self, number: int) -> None:
        """Count a call whose thread may have been overtaken by another one since it took its number."""
        words = self._memory.words
        with self._counting:
            if words[LANE_WORD] < number:
                words[LANE_WORD] = number

    def caller(self, depth: int) -> int:
        """Return the entry of the innermost frame of the program, from ``depth`` frames above on."""
        try:
            innermost = sys._getframe(depth + 1)
        except ValueError:  # called by no Python code, as at the end of the program
            return 0
        return self._call_sites.entry(innermost)

    def failure(self, group: str, error: str, cause: str, ranks: Sequence[int] = ()) -> None:
        """Note an error that this rank raises; the ring then stays when the world ends.

        Args:
            group: its name; "" is none: the program itself raised it.
            error: the name of its class.
            cause: a sentence without a full stop.
            ranks: those that are the cause.
        """
        self._failed = True
        content = {
            "group": group,
            "error": error,
            "text": cause[:2000],
            "ranks": packed_ranks(ranks),
            "at": perf_counter_ns(),
        }
        with self._lock:
            index = self._memory.add_entry(EntryType.FAILURE, content)
            if index:
                self._failures[index] = group


def own_identity() -> str:
    """Return what processes that can read each other's rings, and see each other in ``/proc``, have in common."""
    try:
        return process_space("ipc")
    except OSError:
        return host_name()


#: The recorder of this process.
RECORDER = FlightRecorder()
os.register_at_fork(after_in_child=RECORDER.leave_to_parent)
atexit.register(RECORDER.close)
