"""The summary of a trace: operations, ranks and stragglers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comm_orchestrator.tools.trace.intervals import blocking, covered_ns, hidden_ns, in_progress, span_ns
from comm_utils.observability.traces import RankTrace
from comm_utils.observability.traces.alignment import group_of
from comm_utils.observability.traces.labels import labels
from comm_utils.observability.traces.waiting import Account, Key, account, key_of
from comm_utils.sizes import bandwidth

__all__ = ["OperationRow", "RankRow", "StragglerRow", "Summary", "summarize"]


@dataclass(frozen=True)
class OperationRow:
    """Operations that are alike, over all ranks; each rank's call counts.

    Attributes:
        group: what the group is called in this trace.
        total_s: the sum of all calls' times, of which ``accounted_s`` = ``waiting_s`` + ``transfer_s`` could be split.
        asynchronous: how many of the calls were.
        hidden_share: of the asynchronous ones' time, how much lay between the call's return and the wait for it.
        algbw_gb_per_s, busbw_gb_per_s: of the median time.
        method, wire_bytes: see ``comm_utils.observability.traces.Operation``; the bytes of all calls.
    """

    name: str
    operation: str
    size_bytes: int
    group: str
    ranks: tuple[int, ...]
    caller: str
    calls: int
    total_bytes: int
    total_s: float
    min_s: float
    median_s: float
    p95_s: float
    max_s: float
    accounted_s: float
    waiting_s: float
    transfer_s: float
    asynchronous: int
    hidden_share: float | None
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    method: str = ""
    wire_bytes: int = 0


@dataclass(frozen=True)
class RankRow:
    """One rank.

    Attributes:
        blocked_s, blocked_share: inside of communication's calls and waits, also as a share of the job's wall time.
        progress_share: of the job's wall time, how much had an operation under way, waited for or not.
        waiting_s: the part of its operations' time in which it waited for other ranks to call.
    """

    rank: int
    host: str
    pid: int
    calls: int
    blocked_s: float
    blocked_share: float
    progress_share: float
    waiting_s: float
    clock_uncertainty_s: float
    dropped: int
    complete: bool


@dataclass(frozen=True)
class StragglerRow:
    """A rank that others waited for; see :class:`comm_utils.observability.traces.waiting.Straggler`."""

    rank: int
    host: str
    pid: int
    last: int
    caused_s: float
    typical_late_s: float


@dataclass(frozen=True)
class Summary:
    """All of it.

    Attributes:
        wall_s: from the first call to the last completion, over all ranks.
        matched: how many operations, each counted once, have the records of all ranks that they need.
        unmatched: calls that have not, and are in no split.
    """

    world_size: int
    backend: str
    started: str
    wall_s: float
    matched: int
    unmatched: int
    operations: list[OperationRow]
    ranks: list[RankRow]
    stragglers: list[StragglerRow]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Return the summary of ``traces``, which are aligned."""
    accounted = account(traces)
    begin, end = span_ns(traces)
    wall_ns = end - begin
    return Summary(
        world_size=traces[0].world_size,
        backend=", ".join(sorted({trace.backend for trace in traces if trace.backend})),
        started=min((trace.started for trace in traces if trace.started), default=""),
        wall_s=wall_ns * 1e-9,
        matched=accounted.operations,
        unmatched=accounted.unmatched,
        operations=_operations(traces, accounted),
        ranks=[_rank(trace, accounted, wall_ns) for trace in traces],
        stragglers=[
            StragglerRow(one.rank, one.host, one.pid, one.last, one.caused_ns * 1e-9, one.typical_late_ns * 1e-9)
            for one in accounted.stragglers
        ],
    )


class _Alike:
    """The times of operations that are alike."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.asynchronous = self.asynchronous_ns = self.hidden = self.wire_bytes = 0
        self.groups: set[str] = set()


def _operations(traces: Sequence[RankTrace], accounted: Account) -> list[OperationRow]:
    names = labels(traces)
    found: dict[Key, _Alike] = defaultdict(_Alike)
    for trace in traces:
        for event in trace.events:
            alike = found[key_of(event.operation)]
            alike.times.append(event.duration_ns)
            alike.wire_bytes += event.operation.wire_bytes
            alike.groups.add(names[group_of(event.operation)])
            if event.operation.asynchronous:
                alike.asynchronous += 1
                alike.asynchronous_ns += event.duration_ns
                alike.hidden += hidden_ns(event)
    rows = [_row(key, alike, accounted) for key, alike in found.items()]
    return sorted(rows, key=lambda row: (-row.total_s, row.name, row.size_bytes))


def _row(key: Key, alike: _Alike, accounted: Account) -> OperationRow:
    name, operation, size, ranks, caller, method = key
    shares = [of_rank[key] for of_rank in accounted.shares.values() if key in of_rank]
    times = sorted(alike.times)
    median = _quantile(times, 0.5) * 1e-9
    rate = bandwidth(operation, size, median, len(ranks))
    return OperationRow(
        name=name,
        operation=operation,
        size_bytes=size,
        group=", ".join(sorted(alike.groups)),
        ranks=ranks,
        caller=caller,
        calls=len(times),
        total_bytes=size * len(times),
        total_s=sum(times) * 1e-9,
        min_s=times[0] * 1e-9,
        median_s=median,
        p95_s=_quantile(times, 0.95) * 1e-9,
        max_s=times[-1] * 1e-9,
        accounted_s=sum(share.total_ns for share in shares) * 1e-9,
        waiting_s=sum(share.waiting_ns for share in shares) * 1e-9,
        transfer_s=sum(share.transfer_ns for share in shares) * 1e-9,
        asynchronous=alike.asynchronous,
        hidden_share=alike.hidden / alike.asynchronous_ns if alike.asynchronous_ns else None,
        algbw_gb_per_s=rate.algbw_gb_per_s,
        busbw_gb_per_s=rate.busbw_gb_per_s,
        method=method,
        wire_bytes=alike.wire_bytes,
    )


def _quantile(ordered: Sequence[int], share: float) -> int:
    """Return the least value that so large a share does not exceed."""
    place = -(-share * len(ordered) // 1)
    return ordered[max(int(place) - 1, 0)]


def _rank(trace: RankTrace, accounted: Account, wall_ns: int) -> RankRow:
    blocked_ns = covered_ns(blocking(trace))
    return RankRow(
        rank=trace.rank,
        host=trace.host,
        pid=trace.pid,
        calls=len(trace.events),
        blocked_s=blocked_ns * 1e-9,
        blocked_share=blocked_ns / wall_ns if wall_ns else 0.0,
        progress_share=covered_ns(in_progress(trace)) / wall_ns if wall_ns else 0.0,
        waiting_s=sum(share.waiting_ns for share in accounted.shares.get(trace.rank, {}).values()) * 1e-9,
        clock_uncertainty_s=trace.uncertainty_ns * 1e-9,
        dropped=trace.dropped,
        complete=trace.complete,
    )
