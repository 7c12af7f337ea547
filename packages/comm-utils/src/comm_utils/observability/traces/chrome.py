"""Traces of all ranks as one Chrome trace, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format's JSON object
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). A process is a rank, a thread is one
of its groups, and of each group

* a synchronous operation is a complete event (``X``);
* an asynchronous one is a complete event for its call, an async span (``b``, ``e``) from the call to its completion, on
  a track of its own, and a complete event for each wait;
* a message has an arrow (``s``, ``f``) from its send to its receive.

Operations of one rank and group that overlapped, because several threads called, are put on further threads, so that
complete events of one thread never overlap. Times are microseconds since the first event of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, TextIO

from comm_utils.observability.traces.alignment import Group, group_of
from comm_utils.observability.traces.arrows import Arrows, Message, arrival, call_end
from comm_utils.observability.traces.events import Event, Operation, RankTrace
from comm_utils.observability.traces.labels import labels
from comm_utils.sizes import bandwidth, format_size

__all__ = ["events", "other_data", "write"]

#: What else is known of an event on a rank, for its ``args``.
More = Callable[[int, Event], Mapping[str, Any]]


def write(file: TextIO, traces: Sequence[RankTrace], more: More | None = None) -> None:
    """Write ``traces`` to ``file``, an event a line.

    Args:
        traces: on one clock (:func:`comm_utils.observability.traces.alignment.aligned`).
        more: what else is to be said of an event, given its rank; for an asynchronous one it is said of its span.
    """
    left_out: list[Message] = []
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    for found in events(traces, more, left_out):
        file.write(separator + encode(found))
        separator = ",\n"
    file.write('\n],"otherData":' + json.dumps({**other_data(traces), "arrows_left_out": len(left_out)}) + "}\n")


def other_data(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """Return facts about the whole trace: ranks, accuracy of the clocks, and missing records."""
    traces = list(traces)
    return {
        "format": "comm-trace as Chrome trace",
        "world_size": max((trace.world_size for trace in traces), default=0),
        "backend": ", ".join(sorted({trace.backend for trace in traces if trace.backend})),
        "started": min((trace.started for trace in traces if trace.started), default=""),
        "clock_uncertainty_us": {str(trace.rank): trace.uncertainty_ns / 1000 for trace in traces},
        "dropped_events": {str(trace.rank): trace.dropped for trace in traces if trace.dropped},
        "cut_off_ranks": [trace.rank for trace in traces if not trace.complete],
        "groups": {label: list(ranks) for (_, ranks), label in labels(traces).items()},
    }


def events(
    traces: Sequence[RankTrace], more: More | None = None, left_out: list[Message] | None = None
) -> Iterator[dict[str, Any]]:
    """Return the trace events of ``traces``, rank by rank.

    Args:
        traces, more: as for :func:`write`.
        left_out: gets the messages whose arrow would point backwards in time, by more than the clocks allow to say.
    """
    origin = min((event.begin_ns for trace in traces for event in trace.events), default=0)
    names = labels(traces)
    arrows = Arrows(traces, left_out)
    for trace in traces:
        yield from _of_rank(trace, origin, names, more, arrows)


def _us(duration_ns: int) -> float:
    return duration_ns / 1000


def _of_rank(
    trace: RankTrace,
    origin: int,
    names: Mapping[Group, str],
    more: More | None,
    arrows: Arrows,
) -> Iterator[dict[str, Any]]:
    rank = trace.rank
    where = ", ".join([*([trace.host] if trace.host else []), *([f"pid {trace.pid}"] if trace.pid else [])])
    yield _metadata("process_name", rank, 0, name=f"rank {rank}" + (f" ({where})" if where else ""))
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    threads = _Threads(rank, list(dict.fromkeys(names.values())))
    described: dict[Operation, tuple[str, dict[str, Any]]] = {}
    spans = 0
    for begin, end, event, wait in _slices(trace):
        operation = event.operation
        if operation not in described:
            group = names[group_of(operation)]
            described[operation] = group, _args(operation, group)
        group, args = described[operation]
        track = "messages" if operation.pattern.is_message else group
        at, told = threads.at(track, begin, end)
        yield from told
        span = {"ts": _us(begin - origin), "dur": _us(end - begin), **at}
        named = f"wait for {operation.name}" if wait else operation.name
        if not operation.asynchronous:
            yield {"ph": "X", "cat": "operation", "name": named, **span, "args": _with(args, rank, event, more)}
            yield from arrows.of(event, at, origin)
            continue
        brief = {"size": args["size"], "group": group, "sequence": event.sequence}
        yield {"ph": "X", "cat": "wait" if wait else "call", "name": named, **span, "args": brief}
        sends = operation.pattern.is_send
        if not wait if sends else (begin, end) == arrival(event):
            yield from arrows.of(event, at, origin)
        if not wait:
            spans += 1
            cat = f"asynchronous, {track}"
            common = {"cat": cat, "name": f"{operation.name}, {cat}", "id": f"{rank}.{spans}", **at}
            yield {"ph": "b", "ts": _us(event.begin_ns - origin), **common, "args": _with(args, rank, event, more)}
            yield {"ph": "e", "ts": _us(max(event.begin_ns, event.end_ns) - origin), **common}


def _slices(trace: RankTrace) -> list[tuple[int, int, Event, bool]]:
    """Yield the slices of the rank's own threads: begin, end, event, and whether it is a wait for the event."""
    found = []
    for event in trace.events:
        found.append((event.begin_ns, call_end(event), event, False))
        found.extend((wait.begin_ns, max(wait.begin_ns, wait.end_ns), event, True) for wait in event.waits)
    found.sort(key=lambda one: one[:2])
    return found


def _args(operation: Operation, group: str) -> dict[str, Any]:
    """Return the arguments that all calls of one kind share."""
    found: dict[str, Any] = {
        "operation": operation.operation,
        "size": format_size(operation.size_bytes),
        "size_bytes": operation.size_bytes,
        "group": group,
        "ranks": operation.world_size,
    }
    optional = {
        "dtype": operation.dtype,
        "op": operation.op,
        "caller": operation.caller,
        "method": operation.method,
        "wire_bytes": operation.wire_bytes,
        "input_splits": list(operation.input_splits),
        "output_splits": list(operation.output_splits),
    }
    found.update({name: value for name, value in optional.items() if value})
    if operation.pattern.is_message:
        found["tag"] = operation.tag
        found["other_rank"] = operation.root if operation.root >= 0 else "any"
    elif operation.root >= 0:
        found["root"] = operation.root
    return found


def _with(args: Mapping[str, Any], rank: int, event: Event, more: More | None) -> dict[str, Any]:
    operation = event.operation
    rate = bandwidth(operation.operation, operation.size_bytes, event.duration_ns * 1e-9, operation.world_size)
    found = {
        **args,
        "sequence": event.sequence,
        "algbw_gb_per_s": float(f"{rate.algbw_gb_per_s:.4g}"),
        "busbw_gb_per_s": float(f"{rate.busbw_gb_per_s:.4g}"),
    }
    return {**found, **more(rank, event)} if more is not None else found


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "cat": "__metadata", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


class _Threads:
    """The threads of a rank: one a track, and more where slices of a track overlap."""

    def __init__(self, rank: int, groups: Sequence[str]) -> None:
        self._rank = rank
        self._order = {track: place for place, track in enumerate([*groups, "messages"])}
        self._free: dict[str, list[tuple[int, int]]] = {}  # (free from, lane)
        self._idle: dict[str, list[int]] = {}
        self._ids: dict[tuple[str, int], int] = {}

    def at(self, track: str, begin: int, end: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return the thread for a slice of ``track``, and the metadata of a new thread; slices come in order."""
        busy, idle = self._free.setdefault(track, []), self._idle.setdefault(track, [])
        while busy and busy[0][0] <= begin:
            heappush(idle, heappop(busy)[1])
        lane = heappop(idle) if idle else len(busy)
        heappush(busy, (end, lane))
        told = []
        if (track, lane) not in self._ids:
            tid = self._ids[track, lane] = len(self._ids) + 1
            name = track if not lane else f"{track}, thread {lane + 1}"
            told.append(_metadata("thread_name", self._rank, tid, name=name))
            told.append(_metadata("thread_sort_index", self._rank, tid, sort_index=self._order[track] * 1000 + lane))
        return {"pid": self._rank, "tid": self._ids[track, lane]}, told
