"""Counts and times of communication, by operation and message size, in bounded memory."""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.sizes import bandwidth, format_size

__all__ = ["OPERATIONS", "CommsLogger", "Row", "Series", "format_table"]

#: Every name under which an operation may be recorded.
OPERATIONS = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "inference_all_reduce",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )
)


@dataclass(frozen=True)
class Row:
    """What happened with one operation at one message size in one group; times in seconds.

    Attributes:
        name: what it was recorded as: ``log_name`` of the call, or else the operation.
        ranks: the global ranks of the group; empty where nobody said.
        caller: with ``debug``, the function that called.
    """

    name: str
    operation: str
    size_bytes: int
    world_size: int
    calls: int
    total_bytes: int
    total_s: float
    min_s: float
    median_s: float
    p95_s: float
    max_s: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    ranks: tuple[int, ...] = ()
    caller: str = ""


class Series:
    """The times of operations that are alike: a histogram, so that its memory does not grow with their number.

    A bin is an eighth of a doubling: 6 to 13 % wide.
    """

    __slots__ = ("_bins", "_lock", "calls", "max_ns", "min_ns", "total_ns")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.calls = self.total_ns = self.max_ns = 0
        self.min_ns: int = sys.maxsize
        self._bins: dict[int, int] = {}

    def add(self, duration_ns: int) -> None:
        """Add one operation."""
        with self._lock:
            self.calls += 1
            self.total_ns += duration_ns
            if duration_ns < self.min_ns:
                self.min_ns = duration_ns
            if duration_ns > self.max_ns:
                self.max_ns = duration_ns
            # The highest bit and the three below it.
            shift = duration_ns.bit_length() - 4
            place = duration_ns if shift <= 0 else (shift << 3) + (duration_ns >> shift)
            bins = self._bins
            bins[place] = bins.get(place, 0) + 1

    def quantile_ns(self, share: float) -> float:
        """The middle of the bin in which so large a share of all operations ended, within the extremes."""
        seen = 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= share * self.calls:
                return min(max(_middle_ns(place), self.min_ns), self.max_ns)
        return 0.0


def _middle_ns(place: int) -> float:
    # Of places from 16 on, the lower three bits and a leading one are the mantissa.
    shift = (place >> 3) - 1
    return float(place) if shift <= 0 else ((place & 7 | 8) + 0.5) * 2**shift


class CommsLogger:
    """Records operations; its settings are DeepSpeed's ``comms_logger`` keys.

    Args:
        verbose: log a line for every operation as it ends.
        prof_all: record every operation; otherwise only those in ``prof_ops``, names of :data:`OPERATIONS`.
        debug: keep operations apart by the function of the user's program that called them.
    """

    def __init__(
        self, verbose: bool = False, prof_all: bool = True, prof_ops: Iterable[str] = (), debug: bool = False
    ) -> None:
        self.verbose = verbose
        self.prof_all = prof_all
        self.prof_ops = prof_ops
        self.debug = debug
        self._series: dict[tuple[str, str, int, int, tuple[int, ...], str], Series] = {}
        # Asynchronous operations are recorded by the library's threads.
        self._lock = threading.Lock()

    @property
    def prof_ops(self) -> frozenset[str]:
        """The operations to record where not all are. A name of none is kept, with a WARNING: DeepSpeed has others."""
        return self._prof_ops

    @prof_ops.setter
    def prof_ops(self, names: Iterable[str]) -> None:
        chosen = list(names)
        for name in chosen:
            if not isinstance(name, str):
                raise ArgumentError(f"configure: prof_ops: got {name!r:.60}; expected names of operations")
            if name not in OPERATIONS:
                near = difflib.get_close_matches(name, OPERATIONS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                logger.warning("prof_ops: %r is no operation: only calls with that log_name are recorded%s", name, hint)
        self._prof_ops = frozenset(chosen)

    def wants(self, operation: str) -> bool:
        """Whether ``operation`` is to be recorded."""
        return self.prof_all or operation in self.prof_ops

    @property
    def is_plain(self) -> bool:
        """Whether all that is kept of an operation is its time."""
        return self.prof_all and not (self.verbose or self.debug)

    def series(
        self,
        operation: str,
        size_bytes: int,
        world_size: int,
        ranks: tuple[int, ...] = (),
        caller: str = "",
        name: str | None = None,
    ) -> Series:
        """Where the times of such operations go, for as long as this logger lives."""
        key = (name or operation, operation, size_bytes, world_size, ranks, caller)
        with self._lock:
            found = self._series.get(key)
            if found is None:
                found = self._series[key] = Series(self._lock)
            return found

    def record(
        self,
        operation: str,
        size_bytes: int,
        duration_ns: int,
        world_size: int,
        caller: str = "",
        name: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Add one operation that ended ``duration_ns`` nanoseconds after it was called, under ``name`` or its own."""
        self.series(operation, size_bytes, world_size, ranks, caller, name).add(duration_ns)
        if self.verbose:
            rate = bandwidth(operation, size_bytes, duration_ns * 1e-9, world_size)
            logger.info(
                "%s%s | size: %s | time: %.3f ms | algbw: %.2f GB/s | busbw: %.2f GB/s",
                name or operation,
                f" from {caller}" if caller else "",
                format_size(size_bytes),
                duration_ns * 1e-6,
                rate.algbw_gb_per_s,
                rate.busbw_gb_per_s,
            )

    def rows(self) -> list[Row]:
        """What was recorded, by operation and size."""
        with self._lock:
            snapshot = sorted(self._series.items(), key=lambda item: item[0])
            return [self._row(*key, series) for key, series in snapshot if series.calls]

    @staticmethod
    def _row(
        name: str, operation: str, size: int, world_size: int, ranks: tuple[int, ...], caller: str, series: Series
    ) -> Row:
        median_s = series.quantile_ns(0.5) * 1e-9
        rate = bandwidth(operation, size, median_s, world_size)
        return Row(
            name=name,
            operation=operation,
            size_bytes=size,
            world_size=world_size,
            calls=series.calls,
            total_bytes=size * series.calls,
            total_s=series.total_ns * 1e-9,
            min_s=series.min_ns * 1e-9,
            median_s=median_s,
            p95_s=series.quantile_ns(0.95) * 1e-9,
            max_s=series.max_ns * 1e-9,
            algbw_gb_per_s=rate.algbw_gb_per_s,
            busbw_gb_per_s=rate.busbw_gb_per_s,
            ranks=ranks,
            caller=caller,
        )

    def reset(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            for series in self._series.values():
                series.clear()


_COLUMNS = (
    "operation",
    "size",
    "ranks",
    "calls",
    "bytes",
    "total ms",
    "min us",
    "median us",
    "p95 us",
    "algbw GB/s",
    "busbw GB/s",
)


def _group(row: Row) -> str:
    if row.ranks in ((), tuple(range(row.world_size))):
        return str(row.world_size)
    ranks = str(list(row.ranks)) if row.world_size <= 8 else f"[{row.ranks[0]} ... {row.ranks[-1]}]"
    return f"{row.world_size} {ranks}"


def format_table(rows: Iterable[Row], extra: tuple[str, list[str]] | None = None) -> str:
    """Rows as text.

    Args:
        extra: heading and cells of one more column.
    """
    cells = [
        [
            f"{row.name} ({row.caller})" if row.caller else row.name,
            format_size(row.size_bytes),
            _group(row),
            str(row.calls),
            format_size(row.total_bytes),
            f"{row.total_s * 1e3:.2f}",
            f"{row.min_s * 1e6:.1f}",
            f"{row.median_s * 1e6:.1f}",
            f"{row.p95_s * 1e6:.1f}",
            f"{row.algbw_gb_per_s:.3f}",
            f"{row.busbw_gb_per_s:.3f}",
        ]
        for row in rows
    ]
    heading = list(_COLUMNS)
    if extra is not None:
        heading.append(extra[0])
        for line, cell in zip(cells, extra[1], strict=True):
            line.append(cell)
    widths = [max(len(line[column]) for line in (heading, *cells)) for column in range(len(heading))]
    lines = [heading, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
