"""Read the ring of any process, also while that process writes it, and one that was damaged.

Everything in a ring is bounded and checked: a damaged ring gives less, or :class:`RingError`, and never more memory or
time than its size allows.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from comm_utils import operations
from comm_utils.errors import CommError
from comm_utils.flight_recorder.calls import UNKNOWN_GROUP, Call, Failure, RingGroup, RingHeader, Stack
from comm_utils.flight_recorder.entries import Entries
from comm_utils.flight_recorder.layout import (
    CLOCK,
    FAILED,
    HEADER,
    HEADER_BYTES,
    IN_BACKGROUND,
    JOINED,
    LANE_OFFSETS,
    LANES,
    LARGEST_RECORDS,
    LIMITED,
    MAGIC,
    MARGIN,
    NATIVE_KIND,
    ON_DEVICE,
    RECORD,
    RECORD_BYTES,
    STACK_HEAD,
    WORDS,
    unpacked_kind,
)
from comm_utils.flight_recorder.ring_locks import lock_as_reader
from comm_utils.regular_file import open_regular

__all__ = ["NativeKind", "RingError", "RingReader", "open_ring"]

# Calls of a group with a shorter timeout end by themselves before anybody would look at them.
_SHORT_TIMEOUT_S = 1.0
_WORD = struct.Struct("<Q")
_HEAD = struct.Struct("<3Q")
_LARGEST_RING_BYTES = 1 << 30
_LARGEST_WORLD = 1 << 24
_OF_CALL = ("operation", "call", "dtype", "op", "root", "peer")
_TIME = ~(FAILED | IN_BACKGROUND | LIMITED | ON_DEVICE)


class RingError(CommError, ValueError):
    """A file is no ring, or is damaged beyond reading."""


def open_ring(path: str | os.PathLike[str], owner: int | None = None) -> RingReader:
    """Map the ring at ``path``; what its process writes from now on is seen.

    Args:
        owner: the user id that the file has to have; None for any.

    Raises:
        RingError: it is no ring.
        PermissionError: this process may not read it, or it belongs to another user than ``owner``.
        OSError: it cannot be opened, or is no regular file.
    """
    # The mapping has a descriptor of its own.
    descriptor = open_regular(path, os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if owner not in (None, found.st_uid):
            raise PermissionError(errno.EPERM, f"belongs to uid {found.st_uid}, not to uid {owner}", os.fspath(path))
        size = found.st_size
        if not HEADER_BYTES <= size <= _LARGEST_RING_BYTES:
            raise RingError(f"{Path(path)}: {size} bytes; a ring has {HEADER_BYTES} and more")
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    try:
        return RingReader(memory, MappedFile(os.path.abspath(path), found.st_dev, found.st_ino))
    except RingError as error:
        memory.close()
        raise RingError(f"{Path(path)}: {error}") from None


class MappedFile(NamedTuple):
    """The file of a mapped ring."""

    path: str
    device: int
    inode: int


class NativeKind(NamedTuple):
    """The parts of a kind of native code by which the calls of ranks are compared.

    Attributes:
        group: its name.
        agreed: operation, dtype and reduce op.
        is_uneven: its ranks may have different numbers of elements.
    """

    group: str
    agreed: tuple[str, str, str]
    is_message: bool
    is_rooted: bool
    is_uneven: bool


class RingReader:
    """Reads one ring.

    Args:
        memory: its bytes, or a mapping of its file.
        file: that is mapped; where somebody cuts it off, the ring is empty from the next :meth:`refresh` or
            :meth:`count` on, as reading the mapping would end this process with SIGBUS.

    Raises:
        RingError: it is no ring.
    """

    def __init__(self, memory: bytes | bytearray | mmap.mmap, file: MappedFile | None = None) -> None:
        self.memory = memory
        self._file, self._descriptor = file, -1
        size = len(memory)
        if size < HEADER_BYTES or bytes(memory[: len(MAGIC)]) != MAGIC:
            raise RingError("not a ring of a flight recorder, or of another version")
        (_, records, rank, world, pid, image, started, wall, monotonic, splits, entries, stack, end) = (
            HEADER.unpack_from(memory, 0)
        )
        if not (0 < records <= LARGEST_RECORDS and records & (records - 1) == 0 and 0 < world <= _LARGEST_WORLD):
            raise RingError(f"damaged: {records} records, {world} ranks")
        if not (
            rank < world
            and splits == HEADER_BYTES + LANES * records * RECORD_BYTES
            and splits <= entries <= stack <= end - STACK_HEAD.size
            and end <= size
            and (entries - splits) % 8 == 0
        ):
            raise RingError("damaged: its parts do not fit into it")
        self.records = records
        self.header = RingHeader(rank, world, pid, started, wall, monotonic, image=image)
        self._splits_at, self._split_words = splits, (entries - splits) // 8
        self._entries_at, self._entry_bytes = entries, stack - entries
        self._stack_at, self._stack_bytes = stack, end - stack - STACK_HEAD.size
        self._lock = threading.Lock()
        self._entries = Entries()
        # How often entries had been rewritten, and their bytes, when they were last read.
        self._read = -1, 0
        self.refresh()

    def close(self) -> None:
        """Give the mapping back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(self.memory, mmap.mmap):
            with suppress(BufferError):  # another thread reads, after which it is given back
                self.memory.close()

    def is_locked(self) -> bool:
        """Return whether the process of the ring holds its lock, so that it lives; False where that is not known.

        Where it does not, no process takes the file for its ring until this reader is closed.
        """
        if self._descriptor < 0:
            self._descriptor = self._opened()
        return self._descriptor >= 0 and lock_as_reader(self._descriptor) is False

    def _opened(self) -> int:
        """Return a descriptor of the file, for its lock; -1 where there is none, or its path names another by now."""
        if self._file is None:
            return -1
        try:
            descriptor = open_regular(self._file.path, os.O_NOFOLLOW)
        except OSError:
            return -1
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) == self._file[1:]:
            return descriptor
        os.close(descriptor)
        return -1

    def word(self, name: str) -> int:
        """Return one of ``layout.WORDS``."""
        return int(_WORD.unpack_from(self.memory, WORDS[name])[0])

    def _check_size(self) -> None:
        memory = self.memory
        if self._file is not None and isinstance(memory, mmap.mmap) and memory.size() < len(memory):
            self.memory = bytes(len(self.memory))

    @property
    def groups(self) -> dict[int, RingGroup]:
        """Return the groups by index."""
        return self._entries.groups

    @property
    def kinds(self) -> dict[int, dict[str, Any]]:
        """Return what entries say of kinds of calls, by index."""
        return self._entries.kinds

    @property
    def failures(self) -> list[Failure]:
        """Return what this rank has raised, the oldest first."""
        return list(self._entries.failures.values())

    def failures_after(self, index: int) -> list[tuple[int, Failure]]:
        """Return those of :attr:`failures` whose entries have larger indices, with these."""
        return [one for one in list(self._entries.failures.items()) if one[0] > index]

    def refresh(self) -> None:
        """Read entries that are new since the last time."""
        self._check_size()
        state = self.word("state"), self.word("signal") & 0x7F
        written = self.word("rewritten"), min(self.word("entries_used"), self._entry_bytes)
        if written == self._read and state == (self.header.state, self.header.signal):
            return
        with self._lock:  # the watch and a call that has failed may read at once
            self._read_entries()
            known = {**self._entries.process, "state": state[0], "signal": state[1]}
            self.header = RingHeader(**{**self.header.__dict__, **known})

    def _read_entries(self) -> None:
        """Read what is new, or everything where its process has left out entries of groups that have ended."""
        rewritten = self.word("rewritten")
        if rewritten % 2 and self._read[0] >= 0:
            return  # it is about to
        is_new = rewritten != self._read[0]
        entries = Entries() if is_new else self._entries
        used = min(self.word("entries_used"), self._entry_bytes)
        entries.read(self.memory, self._entries_at, used)
        if self.word("rewritten") == rewritten:
            self._entries, self._read = entries, (rewritten, used)

    # --- calls

    def count(self, lane: int = 0) -> int:
        """Return how many calls of a lane were recorded so far."""
        self._check_size()
        return int(_WORD.unpack_from(self.memory, LANE_OFFSETS[lane])[0])

    def calls(self, lane: int = 0, after: int = 0, most: int | None = None) -> list[Call]:
        """Return the calls of a lane that are still kept, with numbers above ``after``, the last ``most`` of them."""
        last = self.count(lane)
        first = max(after + 1, last - self.records + 1, 1, 1 if most is None else last - most + 1)
        if last - first >= self.records or last > 1 << 62:
            return []
        found = [(number, self.record(lane, number)) for number in range(first, last + 1)]
        oldest = self.count(lane) - self.records + MARGIN if lane or last > self.records else 0
        return [
            call
            for number, record in found
            if record is not None and number > oldest and (call := self._call(lane, number, record)) is not None
        ]

    def end_word(self, lane: int, number: int) -> int:
        """Return word 2 of a record, see ``layout``; 1 where the record is another call's by now."""
        at = HEADER_BYTES + (lane * self.records + (number & self.records - 1)) * RECORD_BYTES
        found, _, end = _HEAD.unpack_from(self.memory, at)
        return int(end) if found == number else 1

    def call(self, lane: int, number: int) -> Call | None:
        """Return one call; None where its record is another call's by now."""
        record = self.record(lane, number)
        return None if record is None else self._call(lane, number, record)

    def backwards(self, lane: int = 0) -> Iterator[Call]:
        """Yield the calls of a lane, the last one first."""
        last = self.count(lane)
        for number in range(last, max(0, last - self.records), -1):
            record = self.record(lane, number)
            call = None if record is None else self._call(lane, number, record)
            if call is not None:
                yield call

    def record(self, lane: int, number: int) -> tuple[int, ...] | None:
        """Return the words of a record; None where it is another call's by now."""
        at = HEADER_BYTES + (lane * self.records + (number & self.records - 1)) * RECORD_BYTES
        record = RECORD.unpack_from(self.memory, at)
        return record if record[0] == number else None

    def _call(self, lane: int, number: int, record: tuple[int, ...]) -> Call | None:
        _, begin, end, kind_and_caller, elements, in_series, digest, extra = record
        kind, caller = kind_and_caller & 0xFFFFFFFF, kind_and_caller >> 32
        if caller and caller not in self._entries.callers:  # it is newer than the last look
            self.refresh()
        entries = self._entries
        described = self._native_kind(kind, extra) if kind & NATIVE_KIND else entries.kinds.get(kind)
        if described is None:
            return None
        group = entries.groups.get(described["group"], UNKNOWN_GROUP)
        sent = received = None
        joined = 0
        tag = described["tag"]
        if described["is_message"]:
            tag = tag or extra >> 32
        elif extra & JOINED and not kind & NATIVE_KIND:
            joined = extra & ~JOINED
        elif extra and not kind & NATIVE_KIND:
            sent, received = self._splits(number, extra - 1, len(group.ranks))
        return Call(
            lane=lane,
            number=number,
            begin_ns=self._ns(lane, begin),
            end_ns=self._ns(lane, end & _TIME) if end & _TIME else 0,
            failed=bool(end & FAILED),
            is_waited_for=end != IN_BACKGROUND,
            is_on_device=end == ON_DEVICE,
            is_limited=end == LIMITED or (end == 0 and group.timeout_s < _SHORT_TIMEOUT_S),
            tag=tag,
            elements=elements,
            in_series=in_series,
            digest=digest,
            sent=sent,
            received=received,
            joined=joined,
            caller=entries.callers.get(caller, ""),
            **{**{name: described[name] for name in _OF_CALL}, "group": group},
        )

    def native_kind(self, kind: int) -> NativeKind | None:
        """Return what a kind of native code is; None where it, or its group, has no name."""
        described = self._native_kind(kind, 0)
        group = self.groups.get(unpacked_kind(kind)["group"])
        if described is None or group is None:
            return None
        pattern = operations.get(described["operation"]).pattern
        agreed = described["operation"], described["dtype"], described["op"]
        return NativeKind(group.name, agreed, pattern.is_message, pattern.is_rooted, pattern.uneven)

    def _native_kind(self, kind: int, extra: int) -> dict[str, Any] | None:
        codes, names = unpacked_kind(kind), self._entries.codes
        try:
            operation = names["operations"][codes["operation"]]
            dtype, op = names["dtypes"][codes["dtype"]], names["ops"][codes["op"]]
            call = names["calls"][extra >> 16 & 0xFFFF]
        except (KeyError, IndexError):
            return None
        row = operations.find(operation)
        if row is None:
            return None
        is_message = row.pattern.is_message
        root, tag = (extra & 0xFFFF) - 1, extra >> 32
        group = self.groups.get(codes["group"], UNKNOWN_GROUP)
        ranks = group.ranks
        other = ranks[root] if 0 <= root < len(ranks) else -1
        return {
            "is_message": is_message,
            "operation": operation,
            "call": call or operation,
            "dtype": "" if row.pattern.is_empty else dtype,
            "op": op if row.pattern.reduces else "",
            "root": other if row.pattern.is_rooted else -1,
            "peer": other if is_message else -1,
            "tag": tag if is_message else 0,
            "group": codes["group"],
        }

    def _splits(self, number: int, place: int, size: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        if place + 2 > self._split_words:
            return None, None
        at = self._splits_at + place * 8
        owner, count = struct.unpack_from("<2Q", self.memory, at)
        if owner != number or count > size or place + 2 + 2 * count > self._split_words:
            return None, None  # overwritten by a later call's
        values = struct.unpack_from(f"<{2 * count}Q", self.memory, at + 16)
        return values[:count], values[count:]

    def _ns(self, lane: int, ticks: int) -> int:
        """Convert ticks of a lane's clock to the monotonic clock."""
        _, ticks_then, ns_then, ns_per_tick = CLOCK.unpack_from(self.memory, LANE_OFFSETS[lane])
        if ns_per_tick == 1.0:
            return int(ticks - ticks_then + ns_then)
        if not 0.0 < ns_per_tick < 1e6:  # damaged, or not known yet
            return int(ns_then)
        return int(ns_then + (int(ticks) - int(ticks_then)) * ns_per_tick)

    def open_calls(self) -> list[Call]:
        """Return the calls under way, of both lanes, the oldest first."""
        found = [call for lane in range(LANES) for call in self.calls(lane) if call.is_open]
        return sorted(found, key=lambda call: call.begin_ns)

    def stack(self) -> Stack | None:
        """Return where the process was in Python when it was last written down; None where it was not."""
        for _ in range(3):
            before, size, at = STACK_HEAD.unpack_from(self.memory, self._stack_at)
            text = bytes(
                self.memory[
                    self._stack_at + STACK_HEAD.size : self._stack_at + STACK_HEAD.size + min(size, self._stack_bytes)
                ]
            )
            if before and before % 2 == 0 and STACK_HEAD.unpack_from(self.memory, self._stack_at)[0] == before:
                return Stack(text.decode(errors="replace"), at)
        return None
