"""An order for the calls that several threads of a rank made at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

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
    return [_in_turn(trace, ready) if _has_overlaps(trace) else trace for trace in traces]


def _key(rank: int, event: Event) -> object:
    """Return the key that the records of one call share; of one that has no number, a key of its own."""
    return (channel_of(rank, event.operation), event.sequence) if event.sequence >= 0 else (rank, id(event))


def _has_overlaps(trace: RankTrace) -> bool:
    """Return whether the rank was in two calls, or waits for calls, at a time."""
    times = [(event.begin_ns, event.end_ns) for event in trace.events if not event.operation.asynchronous]
    times += [(wait.begin_ns, wait.end_ns) for event in trace.events for wait in event.waits[:1]]
    times.sort()
    return any(after[0] < before[1] for before, after in pairwise(times))


def _in_turn(trace: RankTrace, ready: Mapping[object, int]) -> RankTrace:
    events = []
    for event in trace.events:
        at = ready[_key(trace.rank, event)]
        if event.operation.asynchronous:  # its call holds nobody up
            waits = [Wait(max(wait.begin_ns, min(at, wait.end_ns)), wait.end_ns) for wait in event.waits]
            events.append(replace(event, waits=waits))
        else:  # clocks may be wrong
            events.append(replace(event, begin_ns=max(event.begin_ns, min(at, event.end_ns))))
    return replace(trace, events=sorted(events, key=lambda event: event.begin_ns))
