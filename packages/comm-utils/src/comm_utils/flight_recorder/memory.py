"""The memory of a ring, as its own process writes it."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from typing import Any

from comm_utils.flight_recorder.layout import (
    CLOCK,
    ENTRY,
    HEADER,
    HEADER_BYTES,
    LANE_OFFSETS,
    LANES,
    LARGEST_ENTRY_BYTES,
    MAGIC,
    RECORD_BYTES,
    STACK_HEAD,
    WORDS,
    EntryType,
)
from comm_utils.log import logger
from comm_utils.process_state import process_image, start_time

__all__ = ["RingMemory", "ring_bytes"]

SPLIT_WORDS = 8192
ENTRY_BYTES = 128 << 10
STACK_BYTES = 16 << 10
# Room that failures find where groups, kinds and callers have used up the rest.
_LAST_BYTES = 8 << 10
_FEW_KINDS_BYTES = 2 << 10
# What callers may use, so that groups and kinds find the rest: without these, ranks do not compare their calls.
_CALLER_BYTES = 64 << 10
# The largest entry of a failure, so that several find room in the last bytes; and its text without the rest.
_FAILURE_BYTES, _SHORT_TEXT = 4 << 10, 300
_DURING = struct.Struct("<Q")
_KIND_WORD = 3


def ring_bytes(records: int) -> int:
    """Return the size of a ring whose lanes have so many records each."""
    return HEADER_BYTES + LANES * records * RECORD_BYTES + SPLIT_WORDS * 8 + ENTRY_BYTES + STACK_BYTES


def _entry_size(text: bytes) -> int:
    return ENTRY.size + (len(text) + 7) // 8 * 8


def _entry_text(kind: EntryType, content: Any) -> bytes | None:
    """Return the JSON of an entry; None where even the parts that a reader needs are too large."""
    most = (_FAILURE_BYTES if kind is EntryType.FAILURE else LARGEST_ENTRY_BYTES) - ENTRY.size
    for one in _shorter_and_shorter(kind, content):
        text = json.dumps(one, separators=(",", ":")).encode()
        if len(text) <= most:
            return text
    return None


def _shorter_and_shorter(kind: EntryType, content: Any) -> Iterator[Any]:
    yield content
    if kind is EntryType.GROUP:
        yield {**content, "description": ""}
    elif kind is EntryType.PROCESS:
        yield {**content, "program": ""}
    elif kind is EntryType.FAILURE:
        yield {**content, "ranks": []}
        yield {**content, "ranks": [], "text": content["text"][:_SHORT_TEXT]}


class RingMemory:
    """One ring, mapped; without a descriptor it is private memory, which ends with the process.

    Attributes:
        memory: all of it.
        words: the same as words of 64 bits.
        descriptor: of the file, -1 without one.
    """

    def __init__(self, records: int, rank: int, world_size: int, descriptor: int = -1, recorded: bool = True) -> None:
        size = ring_bytes(records)
        self.records, self.descriptor = records, descriptor
        self.memory = mmap.mmap(descriptor, size)
        self.words = memoryview(self.memory).cast("Q")
        self._lock = threading.Lock()
        self._indices: dict[EntryType, int] = dict.fromkeys(EntryType, 0)
        self._splits_at = HEADER_BYTES + LANES * records * RECORD_BYTES
        self._entries_at = self._splits_at + SPLIT_WORDS * 8
        self._stack_at = self._entries_at + ENTRY_BYTES
        self._stack_number = 0
        self._caller_bytes = 0
        self._warns = self._warns_of_callers = recorded
        now = time.perf_counter_ns()
        places = self._splits_at, self._entries_at, self._stack_at, size
        own = rank, world_size, os.getpid(), process_image(), start_time()
        for offset in LANE_OFFSETS:
            CLOCK.pack_into(self.memory, offset, 0, now, now, 1.0)
        self.words[WORDS["recorded"] // 8] = int(recorded)
        # Last, as readers know a ring by its magic.
        HEADER.pack_into(self.memory, 0, MAGIC, records, *own, time.time_ns(), now, *places)

    def add_entry(self, kind: EntryType, content: Any) -> int:
        """Append an entry; return its index, from 1, or 0 where there is no room.

        Of what is too large for an entry, the parts that can be done without are left out.
        """
        text = _entry_text(kind, content)
        if text is None:
            self._warn(f"the description of a {kind.name.lower()} is too large")
            return 0
        with self._lock:
            used = self.words[WORDS["entries_used"] // 8]
            size = _entry_size(text)
            if size <= self._room_for(kind):
                self._indices[kind] += 1
                self._caller_bytes += size if kind is EntryType.CALLER else 0
                at = self._entries_at + used
                ENTRY.pack_into(self.memory, at, kind, len(text), self._indices[kind])
                self.memory[at + ENTRY.size : at + ENTRY.size + len(text)] = text
                self.words[WORDS["entries_used"] // 8] = used + size
                return self._indices[kind]
        if kind is EntryType.CALLER and size <= self._room_for(EntryType.KIND):
            self._warn_of_callers()
        else:
            self._warn(f"the {ENTRY_BYTES >> 10} KiB for names of groups, kinds of calls and callers are used up")
        return 0

    def _room_for(self, kind: EntryType) -> int:
        room = ENTRY_BYTES - self.word("entries_used") - (0 if kind is EntryType.FAILURE else _LAST_BYTES)
        return min(room, _CALLER_BYTES - self._caller_bytes) if kind is EntryType.CALLER else room

    def has_room(self, kind: EntryType, content: object) -> bool:
        """Return whether an entry fits, and a few kinds of calls after it; True for what never will."""
        text = _entry_text(kind, content)
        return text is None or _entry_size(text) + _FEW_KINDS_BYTES <= self._room_for(kind)

    @property
    def is_almost_full(self) -> bool:
        """Return whether entries should be left out soon, if there are some that nobody needs."""
        return self.word("entries_used") > ENTRY_BYTES - _LAST_BYTES - LARGEST_ENTRY_BYTES

    def last_kinds(self, most: int) -> set[int]:
        """Return the kinds of the last ``most`` records of each lane."""
        found = set()
        for lane, offset in enumerate(LANE_OFFSETS):
            last = self.words[offset // 8]
            first = HEADER_BYTES + lane * self.records * RECORD_BYTES
            for number in range(max(1, last - most + 1), last + 1):
                record = (first + (number & self.records - 1) * RECORD_BYTES) // 8
                found.add(self.words[record + _KIND_WORD] & 0xFFFFFFFF)
        return found

    def leave_out(self, indices: Mapping[EntryType, Container[int]]) -> None:
        """Remove entries; the others keep their order and their indices."""
        kept = bytearray()
        with self._lock:
            begin = self._entries_at
            end = begin + self.word("entries_used")
            at = begin
            while at < end:
                kind, size, index = ENTRY.unpack_from(self.memory, at)
                step = ENTRY.size + (size + 7) // 8 * 8
                if index not in indices.get(EntryType(kind), ()):
                    kept += self.memory[at : at + step]
                at += step
            number = self.word("rewritten")
            self.set_word("rewritten", number + 1)
            self.memory[begin : begin + len(kept)] = bytes(kept)
            self.set_word("entries_used", len(kept))
            self.set_word("rewritten", number + 2)

    def _warn(self, reason: str) -> None:
        """Say once that calls are recorded without their description."""
        if self._warns:
            self._warns = False
            logger.warning(
                "the flight recorder of this rank cannot describe some calls from now on, which errors, commctl "
                "postmortem and commctl top do not show: %s",
                reason,
            )

    def _warn_of_callers(self) -> None:
        """Say once that calls are recorded without the line of the program that makes them."""
        if self._warns_of_callers:
            self._warns_of_callers = False
            logger.warning(
                "the flight recorder of this rank has noted %d KiB of lines of the program that make calls, and notes "
                "no further ones: errors, commctl postmortem and commctl top show calls from there without the line",
                _CALLER_BYTES >> 10,
            )

    def add_splits(self, number: int, sent: Any, received: Any) -> int:
        """Store the elements that go to and come from each rank; return their place plus 1, 0 where they do not fit."""
        values = (number, len(sent), *sent, *received)
        if len(values) > SPLIT_WORDS:
            return 0
        used = self.words[WORDS["splits_used"] // 8]
        at = used % SPLIT_WORDS
        if at + len(values) > SPLIT_WORDS:
            used += SPLIT_WORDS - at
            at = 0
        struct.pack_into(f"<{len(values)}Q", self.memory, self._splits_at + at * 8, *values)
        self.words[WORDS["splits_used"] // 8] = used + len(values)
        return at + 1

    def set_stack(self, text: str) -> None:
        """Show others where this process is in Python; the end of a long text is kept."""
        encoded = text.encode(errors="replace")[-(STACK_BYTES - STACK_HEAD.size) :]
        self._stack_number += 1
        _DURING.pack_into(self.memory, self._stack_at, self._stack_number)
        self.memory[self._stack_at + STACK_HEAD.size : self._stack_at + STACK_HEAD.size + len(encoded)] = encoded
        self._stack_number += 1
        STACK_HEAD.pack_into(self.memory, self._stack_at, self._stack_number, len(encoded), time.perf_counter_ns())

    def set_word(self, name: str, value: int) -> None:
        """Set one of the words of the header; see ``layout.WORDS``."""
        self.words[WORDS[name] // 8] = value

    def word(self, name: str) -> int:
        """Return one of the words of the header."""
        return int(self.words[WORDS[name] // 8])

    def close(self) -> None:
        """Give the mapping back, unless something still holds a part of it."""
        self.words.release()
        with suppress(BufferError):
            self.memory.close()
