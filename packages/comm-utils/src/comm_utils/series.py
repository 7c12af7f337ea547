"""The times of operations that are alike, in memory that does not grow with their number."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

from comm_utils.traces.events import Operation

__all__ = ["EVENT", "Histogram", "Recorder", "Series"]

EVENT = Struct("=4q")
_pack = EVENT.pack
_FLUSHED_EVERY_NS = 100 * 10**6


class Histogram:
    """Times in bins that are an eighth of a doubling: 6 to 13 % wide."""

    __slots__ = ("bins", "calls", "max_ns", "min_ns", "total_ns")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.calls = self.total_ns = self.max_ns = 0
        self.min_ns: int = sys.maxsize
        self.bins: dict[int, int] = {}

    def count(self, duration_ns: int) -> None:
        """Add one operation."""
        self.calls += 1
        self.total_ns += duration_ns
        if duration_ns < self.min_ns:
            self.min_ns = duration_ns
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        # The highest bit and the three below it.
        shift = duration_ns.bit_length() - 4
        place = duration_ns if shift <= 0 else (shift << 3) + (duration_ns >> shift)
        bins = self.bins
        bins[place] = bins.get(place, 0) + 1

    def include(self, other: Histogram) -> None:
        """Add all that ``other`` has."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.min_ns = min(self.min_ns, other.min_ns)
        self.max_ns = max(self.max_ns, other.max_ns)
        for place, number in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + number

    def taken(self) -> Histogram:
        """What this has, which then has nothing."""
        other = Histogram()
        other.include(self)
        self.clear()
        return other

    def quantile_ns(self, share: float) -> float:
        """The middle of the bin in which so large a share of all operations ended, within the extremes."""
        seen = 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= share * self.calls:
                return min(max(_middle_ns(place), self.min_ns), self.max_ns)
        return 0.0


def _middle_ns(place: int) -> float:
    # Of places from 16 on, the lower three bits and a leading one are the mantissa.
    shift = (place >> 3) - 1
    return float(place) if shift <= 0 else ((place & 7 | 8) + 0.5) * 2**shift


class Recorder:
    """Where all series of a log put their events.

    Attributes:
        events: the last ones, each what :data:`EVENT` packs: number of the operation, sequence, begin_ns, end_ns.
        write: takes a line of a trace file, or None where no trace is written; ``flush`` writes what it still holds.
        lost: takes the error where ``write`` fails, and sees to it that nobody calls it again.
    """

    __slots__ = ("_flush_at_ns", "events", "flush", "lock", "lost", "write")

    def __init__(self, kept: int, lost: Callable[[OSError], None]) -> None:
        # Asynchronous operations are recorded by the library's threads. A log that is read while it records may be
        # asked by the same thread, from a finalizer.
        self.lock = threading.RLock()
        # Bytes, as the garbage collector would go through that many tuples again and again.
        self.events: deque[bytes] = deque(maxlen=kept)
        self.write: Callable[[str], Any] | None = None
        self.flush: Callable[[], Any] | None = None
        self._flush_at_ns = 0
        self.lost = lost

    def line(self, text: str, now_ns: int) -> None:
        """Write a line; what is a while old does not stay in memory, which may be lost with the process."""
        try:
            if self.write is not None:
                self.write(text)
                if now_ns > self._flush_at_ns and self.flush is not None:
                    self._flush_at_ns = now_ns + _FLUSHED_EVERY_NS
                    self.flush()
        except OSError as error:
            self.lost(error)


class Series(Histogram):
    """One operation's times; ``number`` stands for it in events."""

    __slots__ = ("_recorder", "number", "operation")

    def __init__(self, operation: Operation, number: int, recorder: Recorder) -> None:
        super().__init__()
        self.operation = operation
        self.number = number
        self._recorder = recorder

    def add(self, sequence: int, begin_ns: int, end_ns: int) -> None:
        """Add one synchronous operation. Told apart from :meth:`add_event` because this is on the way of every call."""
        duration_ns = end_ns - begin_ns
        recorder = self._recorder
        with recorder.lock:
            self.calls += 1
            self.total_ns += duration_ns
            if duration_ns < self.min_ns:
                self.min_ns = duration_ns
            if duration_ns > self.max_ns:
                self.max_ns = duration_ns
            shift = duration_ns.bit_length() - 4
            place = duration_ns if shift <= 0 else (shift << 3) + (duration_ns >> shift)
            bins = self.bins
            bins[place] = bins.get(place, 0) + 1
            recorder.events.append(_pack(self.number, sequence, begin_ns, end_ns))
            if recorder.write is not None:
                recorder.line(f"[{self.number},{sequence},{begin_ns},{end_ns}]\n", end_ns)

    def add_event(
        self,
        sequence: int,
        begin_ns: int,
        end_ns: int,
        returned_ns: int | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one operation.

        Args:
            returned_ns: of an asynchronous one, when the call returned.
            own: fields of :class:`Operation` that are other than this series', JSON.
        """
        recorder = self._recorder
        with recorder.lock:
            self.count(end_ns - begin_ns)
            recorder.events.append(_pack(self.number, sequence, begin_ns, end_ns))
            if recorder.write is not None:
                parts = [str(self.number), str(sequence), str(begin_ns), str(end_ns)]
                if returned_ns is not None:
                    parts.append(str(returned_ns))
                if own:
                    parts.append(json.dumps(own, separators=(",", ":")))
                recorder.line(f"[{','.join(parts)}]\n", end_ns)

    def add_wait(self, begin_ns: int, wait_begin_ns: int, wait_end_ns: int) -> None:
        """Somebody waited for the asynchronous operation that began at ``begin_ns``."""
        recorder = self._recorder
        if recorder.write is not None:
            with recorder.lock:
                recorder.line(f"[{begin_ns},{wait_begin_ns},{wait_end_ns}]\n", wait_end_ns)
