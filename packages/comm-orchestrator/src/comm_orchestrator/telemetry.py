"""OpenTelemetry metrics of the comms logger's records.

Instruments are asynchronous: the SDK asks for their values when it collects, and a call of a collective costs nothing
for them.
"""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from comm_utils.active import active_backend
from comm_utils.errors import ArgumentTypeError, BackendUnavailableError, NotInitializedError
from comm_utils.observability.comms_logger import CommsLogger, Row
from comm_utils.observability.exports.groups import format_ranks
from comm_utils.process_locks import ProcessLock

__all__ = ["COUNTERS", "GAUGES", "Total", "start_telemetry"]


class Total(NamedTuple):
    """Totals of similar operations since telemetry began, including those that were deleted from the log."""

    calls: int = 0
    size_bytes: int = 0
    time_s: float = 0.0


#: name -> (unit, what it is, its value for a total)
COUNTERS: dict[str, tuple[str, str, Callable[[Total], float]]] = {
    "comm.operations": ("{operation}", "Communication operations that ended", lambda total: total.calls),
    "comm.io": ("By", "Bytes of these operations, as nccl-tests counts them", lambda total: total.size_bytes),
    "comm.operation.time": ("s", "Time from the calls of these operations to their ends", lambda total: total.time_s),
}
#: likewise, its value for a row
GAUGES: dict[str, tuple[str, str, Callable[[Row], float]]] = {
    "comm.operation.duration.min": ("s", "Shortest time of one operation", lambda row: row.min_s),
    "comm.operation.duration.median": ("s", "Median of the times of single operations", lambda row: row.median_s),
    "comm.operation.duration.p95": ("s", "95th percentile of these times", lambda row: row.p95_s),
    "comm.operation.duration.max": ("s", "Longest time of one operation", lambda row: row.max_s),
}

# The instruments of one collection share a snapshot; nobody gets one that is older than this.
_SNAPSHOT_S = 1.0


def start_telemetry(log: CommsLogger, meter_provider: Any = None) -> Callable[[], None]:
    """Offer what ``log`` records as metrics, until what this returns is called.

    Counters go on rising when the log is reset; gauges are of what was recorded since. To start what has been started
    changes nothing.

    Args:
        meter_provider: None: the global one, which may also be set later.

    Raises:
        BackendUnavailableError: opentelemetry-api is not installed.
        ArgumentTypeError: ``meter_provider`` is none.
    """
    try:
        api = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        raise BackendUnavailableError(
            "start_telemetry: needs opentelemetry-api; install it with: pip install 'comm-orchestrator[otel]'"
        ) from None
    if meter_provider is not None and not isinstance(meter_provider, api.MeterProvider):
        raise ArgumentTypeError(
            f"start_telemetry: meter_provider: got a {type(meter_provider).__name__}, expected a MeterProvider of "
            "OpenTelemetry, or None for the global one"
        )
    with _Sources.turn.lock:
        source = _Sources.of(api, api.get_meter_provider() if meter_provider is None else meter_provider)
        return source.start(log)


class _Sources:
    """One source for each provider.

    OpenTelemetry cannot remove instruments, and of two instruments with one name it reads the first alone.
    """

    turn = ProcessLock(threading.Lock)
    known: ClassVar[weakref.WeakKeyDictionary[Any, _Source]] = weakref.WeakKeyDictionary()
    # Before somebody sets the global provider, another stands in for it, whose instruments move to the real one.
    of_global: _Source | None = None

    @classmethod
    def of(cls, api: Any, provider: Any) -> _Source:
        is_global = provider is api.get_meter_provider()
        source = cls.known.get(provider) or (cls.of_global if is_global else None)
        if source is None:
            source = _Source(api)
            source.register(provider.get_meter("comm_orchestrator"))
        cls.known[provider] = source
        if is_global:
            cls.of_global = source
        return source


class _Source:
    """The values that the instruments of one provider report."""

    def __init__(self, api: Any) -> None:
        self._observation = api.Observation
        self._lock = threading.Lock()
        self._log: CommsLogger | None = None
        self._former: Callable[[], CommsLogger | None] = lambda: None
        self._before: dict[Any, tuple[int, int]] = {}
        self._carried: dict[Any, tuple[int, int]] = {}
        self._counted: dict[Any, tuple[int, int]] = {}
        self._rank: int | None = None
        self._rows: list[tuple[Row, dict[str, str | int]]] = []
        self._sums: list[tuple[Total, dict[str, str | int]]] = []
        self._taken_s = 0.0
        self._told: set[str] = set()

    def register(self, meter: Any) -> None:
        for name, (unit, what, of_total) in COUNTERS.items():
            meter.create_observable_counter(name, [self._callback(name, True, of_total)], unit, what)
        for name, (unit, what, of_row) in GAUGES.items():
            meter.create_observable_gauge(name, [self._callback(name, False, of_row)], unit, what)

    def start(self, log: CommsLogger) -> Callable[[], None]:
        with self._lock:
            if self._former() is not log:
                self._carried = dict(self._counted)  # of another log, and not forgotten
                # What was forgotten before is nobody's concern.
                here = {tuple(_kind(row)): row for row in log.rows()}
                self._before = {
                    kind: (calls - here[kind].calls, time_ns - round(here[kind].total_s * 1e9))
                    if kind in here
                    else (calls, time_ns)
                    for kind, (calls, time_ns) in log.totals().items()
                }
            self._log, self._former = log, weakref.ref(log)
            self._told = {*COUNTERS, *GAUGES}

        def stop() -> None:
            with self._lock:
                if self._log is log:
                    self._log = None
                    self._rows, self._sums = [], []

        return stop

    def _callback(self, name: str, counts: bool, value: Callable[[Any], float]) -> Callable[[Any], list[Any]]:
        def observe(_: Any) -> list[Any]:
            with self._lock:
                if self._log is None:
                    return []
                # An instrument that asks again does so for another collection.
                if name in self._told or time.monotonic() - self._taken_s > _SNAPSHOT_S:
                    self._take(self._log)
                self._told.add(name)
                told: list[Any] = self._sums if counts else self._rows
                return [self._observation(value(found), attributes) for found, attributes in told]

        return observe

    def _take(self, log: CommsLogger) -> None:
        with suppress(NotInitializedError):  # a reader may collect once more after the world has ended
            self._rank = active_backend().get_rank()
        rows = log.rows()
        self._rows = [(row, _attributes(_kind(row), self._rank)) for row in rows]
        self._counted = dict(self._carried)
        for found, (calls, time_ns) in log.totals().items():
            carried, before = self._carried.get(found, (0, 0)), self._before.get(found, (0, 0))
            self._counted[found] = carried[0] + calls - before[0], carried[1] + time_ns - before[1]
        self._sums = []
        for found, (calls, time_ns) in self._counted.items():
            if calls:
                kind = _Kind(*found)
                total = Total(calls, kind.size_bytes * calls, time_ns * 1e-9)
                self._sums.append((total, _attributes(kind, self._rank)))
        self._taken_s = time.monotonic()
        self._told = set()


class _Kind(NamedTuple):
    name: str
    operation: str
    size_bytes: int
    ranks: tuple[int, ...]
    caller: str
    method: str
    wire_bytes: int


def _kind(row: Row) -> _Kind:
    return _Kind(row.name, row.operation, row.size_bytes, row.ranks, row.caller, row.method, row.wire_bytes)


def _attributes(kind: _Kind, rank: int | None) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "comm.operation": kind.operation,
        "comm.name": kind.name,
        "comm.size_bytes": kind.size_bytes,
        "comm.world_size": len(kind.ranks),
        "comm.ranks": format_ranks(kind.ranks),
    }
    if rank is not None:
        found["comm.rank"] = rank
    if kind.caller:
        found["code.function.name"] = kind.caller
    if kind.method:
        found["comm.method"] = kind.method
        found["comm.wire_bytes"] = kind.wire_bytes
    return found
