"""Stretches of time, and what they cover together."""

from __future__ import annotations

from collections.abc import Iterable

from comm_utils.observability.traces import Event, RankTrace

__all__ = ["blocking", "covered_ns", "hidden_ns", "in_progress", "span_ns"]

Interval = tuple[int, int]


def covered_ns(intervals: Iterable[Interval]) -> int:
    """Return how long at least one of them lasts."""
    total = 0
    until: int | None = None
    for begin, end in sorted(intervals):
        start = begin if until is None else max(begin, until)
        total += max(end - start, 0)
        until = end if until is None else max(until, end)
    return total


def span_ns(traces: Iterable[RankTrace]) -> Interval:
    """Return the times of the first call and the last completion; ``(0, 0)`` where there is none."""
    events = [event for trace in traces for event in trace.events]
    begin_ns = min((event.begin_ns for event in events), default=0)
    return begin_ns, max(map(_end, events), default=0)


def _end(event: Event) -> int:
    return max([event.end_ns, event.returned_ns, *(wait.end_ns for wait in event.waits)])


def blocking(trace: RankTrace) -> list[Interval]:
    """Return when the rank's threads were in communication.

    Synchronous operations, calls of asynchronous ones, waits.
    """
    found = []
    for event in trace.events:
        found.append((event.begin_ns, event.returned_ns if event.operation.asynchronous else event.end_ns))
        found.extend((wait.begin_ns, wait.end_ns) for wait in event.waits)
    return found


def in_progress(trace: RankTrace) -> list[Interval]:
    """Return when an operation of the rank was under way."""
    return [(event.begin_ns, event.end_ns) for event in trace.events]


def hidden_ns(event: Event) -> int:
    """Return how long an asynchronous operation went on while the program was free to compute.

    From the call's return until somebody waited or it was complete.
    """
    until = min((wait.begin_ns for wait in event.waits), default=event.end_ns)
    return max(min(until, event.end_ns) - event.returned_ns, 0)
