"""The rings of several ranks in one process: for tests of what compares them."""

from __future__ import annotations

from typing import Any

from comm_utils import operations
from comm_utils.flight_recorder import FlightRecorder, RingReader
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.recorder import WAITED_FOR

__all__ = ["Ring"]


class Ring:
    """A ring in this process's memory, as a rank writes and others read it."""

    def __init__(self, rank: int = 0, records: int = 1024, world_size: int = 2) -> None:
        self.recorder = FlightRecorder()
        self.recorder._use(RingMemory(records, rank, world_size))
        self.ranks = range(world_size)
        self._reader: RingReader | None = None

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
        return described.begin(elements, 0, state=state)

    def call(self, operation: str = "all_reduce", elements: int = 4, times: int = 1, **kind: Any) -> None:
        """Record calls that have ended."""
        for _ in range(times):
            self.end(self.begin(operation, elements, **kind))

    def end(self, number: int) -> None:
        """Record the end of a call."""
        kind = self.recorder.kind(self.group(), "barrier", "barrier")
        kind.end(number)

    @property
    def reader(self) -> RingReader:
        """Return the ring as others read it, with what is new."""
        if self._reader is None:
            self._reader = RingReader(self.recorder.memory.memory)
        self._reader.refresh()
        return self._reader
