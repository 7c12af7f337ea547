"""The rings of several ranks in one process: for tests of what compares them."""

from __future__ import annotations

from typing import Any

from comm_utils import operations
from comm_utils.flight_recorder import FlightRecorder, RingReader
from comm_utils.flight_recorder.layout import (
    CLOCK,
    FAILED,
    HEADER_BYTES,
    LANE_OFFSETS,
    RECORD,
    RECORD_BYTES,
    EntryType,
    packed_kind,
)
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.recorder import WAITED_FOR

__all__ = ["Ring"]

_NATIVE = {
    "operations": [row.name for row in operations.rows() if row.native_code >= 0],
    "dtypes": ["float32", "int32"],
    "ops": ["sum", "max"],
    "calls": [""],
}


class Ring:
    """A ring in this process's memory, as a rank writes and others read it."""

    def __init__(self, rank: int = 0, records: int = 1024, world_size: int = 2) -> None:
        self.recorder = FlightRecorder()
        self.recorder._use(RingMemory(records, rank, world_size))
        self.ranks = range(world_size)
        self._reader: RingReader | None = None
        self._native_calls = 0
        self._native_series: dict[str, int] = {}

    def group(self, name: str = "world") -> int:
        """Return the index of a group of all ranks."""
        return self.recorder.group_index(name, self.ranks, name, "gloo")

    def begin(
        self,
        operation: str = "all_reduce",
        elements: int = 4,
        group: str = "world",
        state: int = WAITED_FOR,
        call: str = "",
        dtype: str = "float32",
        **kind: Any,
    ) -> int:
        """Record that a call begins; return its number. ``call`` is the user's, if it is not the operation."""
        if operations.get(operation).pattern.reduces:
            kind.setdefault("op", "sum")
        described = self.recorder.kind(self.group(group), operation, call or operation, dtype, **kind)
        return described.begin(elements, 0, None, None, state)

    def call(self, operation: str = "all_reduce", elements: int = 4, times: int = 1, **kind: Any) -> None:
        """Record calls that have ended."""
        for _ in range(times):
            self.end(self.begin(operation, elements, **kind))

    def end(self, number: int) -> None:
        """Record the end of a call."""
        kind = self.recorder.kind(self.group(), "barrier", "barrier")
        kind.end(number)

    def native_call(
        self,
        operation: str = "all_reduce",
        elements: int = 4,
        group: str = "world",
        dtype: str = "float32",
        op: str = "sum",
        root: int = -1,
        tag: int = 0,
        state: str = "done",
        waited_for: bool = True,
    ) -> None:
        """Record a call as native code does.

        Args:
            root: or the peer of a message.
            state: ``"done"``, ``"open"``, or ``"failed"``.
        """
        memory = self.recorder.memory
        if not self._native_calls:
            memory.add_entry(EntryType.CODES, _NATIVE)
        in_series = 0
        if not operations.get(operation).pattern.is_message:
            in_series = self._native_series[group] = self._native_series.get(group, 0) + 1
        self._native_calls = number = self._native_calls + 1
        operation_code, dtype_code, op_code = (
            _NATIVE[name].index(one) for name, one in (("operations", operation), ("dtypes", dtype), ("ops", op))
        )
        kind = packed_kind(operation_code, dtype_code, op_code, self.group(group), not waited_for)
        ended = {"done": 2 * number, "open": 0, "failed": 2 * number | FAILED}[state]
        at = HEADER_BYTES + (memory.records + (number & memory.records - 1)) * RECORD_BYTES
        extra = tag << 32 | root + 1
        RECORD.pack_into(memory.memory, at, number, number, ended, kind, elements, in_series, 0, extra)
        CLOCK.pack_into(memory.memory, LANE_OFFSETS[1], number, 1, 1, 1.0)

    @property
    def reader(self) -> RingReader:
        """Return the ring as others read it, with what is new."""
        if self._reader is None:
            self._reader = RingReader(self.recorder.memory.memory)
        self._reader.refresh()
        return self._reader
