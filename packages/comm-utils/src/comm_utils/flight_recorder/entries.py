"""The entries of a ring, as a reader knows them."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

from comm_utils import json_files, operations
from comm_utils.flight_recorder.calls import Failure, RingGroup
from comm_utils.flight_recorder.layout import ENTRY, LARGEST_ENTRY_BYTES, EntryType
from comm_utils.flight_recorder.rank_ranges import LARGEST_GROUP, MOST_RANKS, unpacked_ranks

__all__ = ["Entries"]


class Entries:
    """The contents of the entries of a ring, kept as they are read.

    Attributes:
        groups, kinds, callers: by index.
        failures: by index, the oldest first.
        codes: names of the codes in kinds of native code.
        process: fields of the header.
    """

    def __init__(self) -> None:
        self.groups: dict[int, RingGroup] = {}
        self.kinds: dict[int, dict[str, Any]] = {}
        self.callers: dict[int, str] = {}
        self.failures: dict[int, Failure] = {}
        self.codes: dict[str, list[str]] = {}
        self.process: dict[str, str] = {}
        self._read_bytes = 0
        self._more_ranks = MOST_RANKS

    def read(self, memory: bytes | bytearray | mmap.mmap, begin: int, used: int) -> None:
        """Read those that are new.

        Args:
            begin: where the entries begin.
            used: so many bytes of them are written.
        """
        while self._read_bytes + ENTRY.size <= used:
            at = begin + self._read_bytes
            kind, size, index = ENTRY.unpack_from(memory, at)
            step = ENTRY.size + (size + 7) // 8 * 8
            # No entry is empty, so a size of 0 is memory that nobody wrote.
            if not 0 < size <= LARGEST_ENTRY_BYTES or self._read_bytes + step > used:
                self._read_bytes = used  # damaged; what follows has no beginning
                break
            self._read_bytes += step
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                text = bytes(memory[at + ENTRY.size : at + ENTRY.size + size]).decode()
                self._add(kind, index, json_files.parse(text, "an entry"))

    def _add(self, kind: int, index: int, content: Any) -> None:
        if kind == EntryType.GROUP:
            ranks = self._ranks(content["ranks"])
            self.groups[index] = RingGroup(
                str(content["name"]),
                ranks,
                str(content["description"]),
                str(content["backend"]),
                float(content.get("timeout_s") or math.inf),
            )
        elif kind == EntryType.KIND:
            row = operations.find(str(content["operation"]))
            self.kinds[index] = {
                "is_message": row is not None and row.pattern.is_message,
                "is_send": row is not None and row.pattern.is_send,
                "is_uneven": row is not None and row.pattern.uneven and not content.get("op"),
                "operation": str(content["operation"]),
                "call": str(content["call"]),
                "dtype": str(content["dtype"]),
                "op": str(content.get("op", "")),
                "root": int(content.get("root", -1)),
                "peer": int(content.get("peer", -1)),
                "tag": int(content.get("tag", 0)),
                "group": int(content["group"]),
            }
        elif kind == EntryType.CALLER:
            self.callers[index] = str(content)
        elif kind == EntryType.FAILURE:
            ranks = self._ranks(content["ranks"])
            found = Failure(
                str(content["group"]), str(content["error"]), str(content["text"]), int(content["at"]), ranks
            )
            self.failures[index] = found
        elif kind == EntryType.CODES:
            self.codes = {
                name: [str(one) for one in content[name]] for name in ("operations", "dtypes", "ops", "calls")
            }
        elif kind == EntryType.PROCESS:
            self.process = {
                name: str(content.get(name, "")) for name in ("host", "identity", "job", "python", "program")
            }

    def _ranks(self, packed: Any) -> tuple[int, ...]:
        ranks = unpacked_ranks(packed, min(LARGEST_GROUP, self._more_ranks))
        self._more_ranks -= len(ranks)
        return ranks
