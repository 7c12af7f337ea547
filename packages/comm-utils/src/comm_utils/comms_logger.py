"""Counts and times of communication, by operation and message size, in bounded memory."""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.sizes import bandwidth, format_size

__all__ = ["OPERATIONS", "CommsLogger", "Row", "format_table"]

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

_BINS_PER_DOUBLING = 8


@dataclass(frozen=True)
class Row:
    """What happened with one operation at one message size on groups of one size; times in seconds.

    Attributes:
        name: what it was recorded as: ``log_name`` of the call, or else the operation.
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
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    caller: str = ""


class _Durations:
    """A histogram with bins 9 % wide, so that its memory does not grow with the number of calls."""

    __slots__ = ("bins", "calls", "min_s", "total_s")

    def __init__(self) -> None:
        self.calls = 0
        self.total_s = 0.0
        self.min_s = math.inf
        self.bins: dict[int, int] = {}

    def add(self, duration_s: float) -> None:
        self.calls += 1
        self.total_s += duration_s
        self.min_s = min(self.min_s, duration_s)
        place = round(math.log2(max(duration_s, 1e-9)) * _BINS_PER_DOUBLING)
        self.bins[place] = self.bins.get(place, 0) + 1

    def quantile_s(self, share: float) -> float:
        seen = 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= share * self.calls:
                return max(self.min_s, math.pow(2, place / _BINS_PER_DOUBLING))
        return 0.0


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
        self._durations: dict[tuple[str, str, int, int, str], _Durations] = {}
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

    def record(
        self,
        operation: str,
        size_bytes: int,
        duration_s: float,
        world_size: int,
        caller: str = "",
        name: str | None = None,
    ) -> None:
        """Add one operation that ended ``duration_s`` seconds after it was called, under ``name`` or its own."""
        key = (name or operation, operation, size_bytes, world_size, caller)
        with self._lock:
            durations = self._durations.get(key)
            if durations is None:
                durations = self._durations[key] = _Durations()
            durations.add(duration_s)
        if self.verbose:
            rate = bandwidth(operation, size_bytes, duration_s, world_size)
            logger.info(
                "%s%s | size: %s | time: %.3f ms | algbw: %.2f GB/s | busbw: %.2f GB/s",
                key[0],
                f" from {caller}" if caller else "",
                format_size(size_bytes),
                duration_s * 1e3,
                rate.algbw_gb_per_s,
                rate.busbw_gb_per_s,
            )

    def rows(self) -> list[Row]:
        """What was recorded, by operation and size."""
        with self._lock:
            snapshot = sorted(self._durations.items(), key=lambda item: item[0])
            return [self._row(*key, durations) for key, durations in snapshot]

    @staticmethod
    def _row(name: str, operation: str, size: int, world_size: int, caller: str, durations: _Durations) -> Row:
        median_s = durations.quantile_s(0.5)
        rate = bandwidth(operation, size, median_s, world_size)
        return Row(
            name,
            operation,
            size,
            world_size,
            durations.calls,
            size * durations.calls,
            durations.total_s,
            durations.min_s,
            median_s,
            rate.algbw_gb_per_s,
            rate.busbw_gb_per_s,
            caller,
        )

    def reset(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._durations.clear()


_COLUMNS = (
    "operation",
    "size",
    "ranks",
    "calls",
    "bytes",
    "total ms",
    "min us",
    "median us",
    "algbw GB/s",
    "busbw GB/s",
)


def format_table(rows: Iterable[Row], extra: tuple[str, list[str]] | None = None) -> str:
    """Rows as text.

    Args:
        extra: heading and cells of one more column.
    """
    cells = [
        [
            f"{row.name} ({row.caller})" if row.caller else row.name,
            format_size(row.size_bytes),
            str(row.world_size),
            str(row.calls),
            format_size(row.total_bytes),
            f"{row.total_s * 1e3:.2f}",
            f"{row.min_s * 1e6:.1f}",
            f"{row.median_s * 1e6:.1f}",
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
