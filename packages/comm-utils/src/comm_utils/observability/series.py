"""The times of operations that are alike, in memory that does not grow with their number."""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from operator import sub
from typing import Any, Protocol, TypeAlias

from comm_utils.observability.traces.events import Operation

__all__ = ["NUMBERS_WAITING", "Histogram", "Recorder", "Series"]

#: Number of the series, sequence, begin_ns, end_ns.
_Times: TypeAlias = tuple[int, int, int, int]
#: So many numbers wait to be counted, four for each operation.
NUMBERS_WAITING = 4 * 512
_FLUSHED_EVERY_NS = 100 * 10**6
# Of the upper 16 bits of a double, those after the sign are its exponent and the first four of its mantissa: a bin, but
# for numbers below 16, which have one each. Bin 16 is that of 16.0.
_UPPER = 3 if sys.byteorder == "little" else 0
_AT_16 = 1027 << 4


class Histogram:
    """Times in bins that are a sixteenth of a doubling: 3 to 6 % wide."""

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
        # The highest bit and the four below it.
        shift = duration_ns.bit_length() - 5
        place = duration_ns if shift <= 0 else (shift << 4) + (duration_ns >> shift)
        self.bins[place] = self.bins.get(place, 0) + 1

    def count_all(self, durations_ns: list[int]) -> None:
        """Add operations, of which there are some."""
        self.calls += len(durations_ns)
        self.total_ns += sum(durations_ns)
        self.min_ns = min(self.min_ns, *durations_ns)
        self.max_ns = max(self.max_ns, *durations_ns)
        bins = self.bins
        for upper, number in Counter(
            memoryview(array("d", durations_ns)).cast("B").cast("H")[_UPPER::4].tolist()
        ).items():
            place = upper - _AT_16 + 16 if upper >= _AT_16 else _small(upper)
            bins[place] = bins.get(place, 0) + number

    def include(self, other: Histogram) -> None:
        """Add all that ``other`` has."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.min_ns = min(self.min_ns, other.min_ns)
        self.max_ns = max(self.max_ns, other.max_ns)
        for place, number in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + number

    def taken(self) -> Histogram:
        """Take the contents out, and leave it empty."""
        other = Histogram()
        other.include(self)
        self.clear()
        return other

    def quantile_ns(self, share: float) -> float:
        """Return the middle of the bin in which so large a share of all operations ended, within the extremes."""
        seen = 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= share * self.calls:
                return min(max(_middle_ns(place), self.min_ns), self.max_ns)
        return 0.0


def _small(upper: int) -> int:
    """Return the number from 0 to 15 that has these upper bits as a double."""
    return (upper & 15 | 16) >> 4 + 1023 - (upper >> 4) if upper else 0


def _middle_ns(place: int) -> float:
    # Of places from 32 on, the lower four bits and a leading one are the mantissa.
    shift = (place >> 4) - 1
    return float(place) if shift <= 0 else ((place & 15 | 16) + 0.5) * 2**shift


class Writer(Protocol):
    """Takes the lines of a trace file; ``flush`` writes what it still holds."""

    def write(self, text: str) -> Any: ...

    def flush(self) -> Any: ...


class Recorder:
    """The buffer into which all series of a log put their events.

    A call leaves four numbers in ``waiting``, and calls :meth:`settle` when there are :data:`NUMBERS_WAITING` or
    ``due_ns`` has passed. Counting many at once takes less time, and far less where the communication has left nothing
    in the caches.

    Args:
        kept: number of the last events that are kept individually.
        lost: takes the error where the writer fails, and sees to it that it is used no more.

    Attributes:
        waiting: of events that are not counted yet: number of the series, sequence, begin_ns, end_ns, one after the
            other.
        due_ns: when they have to be, by ``time.perf_counter_ns``, as a trace is written.
        series: by their numbers.
        released: record operations whose handles were released. Finalizers add to it and take no lock, as they may come
            in the middle of anything, such as of reading the records.
        writes: whether events are written.
    """

    __slots__ = (
        "_held",
        "_kept",
        "_last",
        "_lost",
        "_settling",
        "_writer",
        "due_ns",
        "lock",
        "released",
        "series",
        "waiting",
        "writes",
    )

    def __init__(self, kept: int, lost: Callable[[OSError], None]) -> None:
        self.forked()
        self.waiting: list[int] = []
        self.series: list[Series] = []
        self.released: deque[Callable[[], None]] = deque()
        # Arrays, as the garbage collector would go through that many tuples again and again.
        self._last: deque[array[int]] = deque()
        self._held, self._kept = 0, 4 * kept
        self._lost = lost
        self.write_to(None)

    def forked(self) -> None:
        """Forget who holds the lock, and what that thread was doing."""
        # Asynchronous operations are recorded by the library's threads. Who records while this settles has the lock.
        self.lock = threading.RLock()
        self._settling = False

    def write_to(self, writer: Writer | None) -> None:
        """Write a line for each event from now on, or no more."""
        self._writer, self.writes = writer, writer is not None
        self.due_ns: int = sys.maxsize if writer is None else 0

    def settle(self) -> None:
        """Count what waits."""
        with self.lock:
            if self._settling:  # one of what was released
                return
            self._settling = True
            try:
                while self.released:
                    self.released.popleft()()
                found = self.waiting[:]
                del self.waiting[: len(found)]  # others may have come meanwhile
                if found:
                    self._count(found)
            finally:
                self._settling = False

    def settle_if_due(self, now_ns: int) -> None:
        """Write and flush what waits, if nothing that ended has done so for a while: nothing may end any more."""
        if now_ns <= self.due_ns:
            return
        with self.lock:
            self.settle()
            self.line("", now_ns)

    def _count(self, found: list[int]) -> None:
        self.keep(array("q", found))
        numbers, durations = found[::4], list(map(sub, found[3::4], found[2::4]))
        if numbers.count(numbers[0]) == len(numbers):
            self.series[numbers[0]].count_all(durations)
        else:
            by_series = defaultdict(list)
            for number, duration_ns in zip(numbers, durations, strict=True):
                by_series[number].append(duration_ns)
            for number, durations in by_series.items():
                self.series[number].count_all(durations)
        if self._writer is not None:
            self.line("".join([f"[{n},{sequence},{b},{e}]\n" for n, sequence, b, e in _fours(found)]), found[-1])

    def line(self, text: str, now_ns: int) -> None:
        """Write lines; what is a while old does not stay in memory, which may be lost with the process."""
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(text)
            if now_ns > self.due_ns:
                self.due_ns = now_ns + _FLUSHED_EVERY_NS
                writer.flush()
        except OSError as error:
            self._lost(error)

    def keep(self, events: array[int]) -> None:
        """Keep events that were counted, and forget the oldest."""
        self._last.append(events)
        self._held += len(events)
        while self._held - len(self._last[0]) >= self._kept:
            self._held -= len(self._last.popleft())

    def last(self, most: int) -> list[_Times]:
        """Return the last events that were counted, at most so many and no more than are kept."""
        together = _fours(chain.from_iterable(self._last))
        return list(islice(together, max(self._held - min(4 * most, self._kept), 0) // 4, None))

    def forget(self) -> None:
        """Keep none of the events up to now."""
        self._last.clear()
        self._held = 0


def _fours(numbers: Any) -> Iterator[_Times]:
    each = iter(numbers)
    return zip(each, each, each, each, strict=True)


class Series(Histogram):
    """One operation's times; ``number`` stands for it in events."""

    __slots__ = ("_recorder", "number", "operation")

    def __init__(self, operation: Operation, recorder: Recorder) -> None:
        super().__init__()
        self.operation = operation
        self.number = len(recorder.series)
        recorder.series.append(self)
        self._recorder = recorder

    def add(self, sequence: int, begin_ns: int, end_ns: int) -> None:
        """Add one synchronous operation. Separate from :meth:`add_event`, because every call passes here."""
        recorder = self._recorder
        waiting = recorder.waiting
        waiting.extend((self.number, sequence, begin_ns, end_ns))
        if len(waiting) >= NUMBERS_WAITING or end_ns > recorder.due_ns:
            recorder.settle()

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
        if not recorder.writes:
            self.add(sequence, begin_ns, end_ns)
            return
        with recorder.lock:
            recorder.settle()
            self.count(end_ns - begin_ns)
            times = self.number, sequence, begin_ns, end_ns
            recorder.keep(array("q", times))
            parts = [str(one) for one in times]
            if returned_ns is not None:
                parts.append(str(returned_ns))
            if own:
                parts.append(json.dumps(own, separators=(",", ":")))
            recorder.line(f"[{','.join(parts)}]\n", end_ns)

    def add_wait(self, begin_ns: int, wait_begin_ns: int, wait_end_ns: int) -> None:
        """Somebody waited for the asynchronous operation that began at ``begin_ns``."""
        recorder = self._recorder
        if recorder.writes:
            with recorder.lock:
                recorder.line(f"[{begin_ns},{wait_begin_ns},{wait_end_ns}]\n", wait_end_ns)
