"""An order for the calls that several threads of a rank made at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from comm_utils.observability.traces import Event, RankTrace, Wait
from comm_utils.observability.traces.alignment import channel_of

__all__ = ["one_after_another"]


def one_after_another(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return ``traces`` with times by which one thread of each rank can make the calls in turn.

    Threads may have begun such calls in another order on each rank, which would wait for each other for ever. Where
    calls of a rank overlap, each therefore begins when the last of its ranks had begun it. A call that ended before
    another began comes before that by this time, too, so the ranks without threads, which stay as they are, have the
    same order.

    Args:
        traces: of all ranks, aligned.
    """
    ready: dict[object, int] = {}
    for trace in traces:
        for event in trace.events:
            key = _key(trace.rank, event)
            ready[key] = max(event.begin_ns, ready.get(key, event.begin_ns))
    return [_in_turn(trace, ready) for trace in traces]


def _key(rank: int, event: Event) -> object:
    """Return the key that the records of one call share; of one that has no number, a key of its own."""
    return (channel_of(rank, event.operation), event.sequence) if event.sequence >= 0 else (rank, id(event))


def _overlapping(trace: RankTrace) -> set[int]:
    """Return the places of the events in whose calls, or waits for them, the rank was at a time."""
    spans = [
        (span.begin_ns, span.end_ns, place)
        for place, event in enumerate(trace.events)
        for span in (event.waits[:1] if event.operation.asynchronous else (event,))
    ]
    found: set[int] = set()
    cluster: list[int] = []
    until_ns = 0
    for begin_ns, end_ns, place in sorted(spans):
        if begin_ns >= until_ns:
            cluster = []
        cluster.append(place)
        until_ns = max(until_ns, end_ns)
        if len(cluster) > 1:
            found.update(cluster)
    return found


def _in_turn(trace: RankTrace, ready: Mapping[object, int]) -> RankTrace:
    overlapping = _overlapping(trace)
    if not overlapping:
        return trace
    events = []
    latest: dict[object, int] = {}  # by channel, whose calls keep their order
    for place, event in enumerate(trace.events):
        at = ready[_key(trace.rank, event)] if place in overlapping else event.begin_ns
        channel = channel_of(trace.rank, event.operation)
        least_ns = max(event.begin_ns, latest.get(channel, event.begin_ns))
        if event.operation.asynchronous:  # its call holds nobody up
            waits = [Wait(max(wait.begin_ns, min(at, wait.end_ns)), wait.end_ns) for wait in event.waits]
            events.append(replace(event, begin_ns=least_ns, waits=waits))
        else:  # clocks may be wrong
            events.append(replace(event, begin_ns=max(least_ns, min(at, event.end_ns))))
        latest[channel] = events[-1].begin_ns
    return replace(trace, events=sorted(events, key=lambda event: event.begin_ns))
