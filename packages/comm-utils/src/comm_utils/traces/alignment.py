"""Puts the traces of several ranks side by side: one clock, and one count of the collectives of each group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from comm_utils.traces.events import Event, Operation, RankTrace, Wait

__all__ = ["COLLECTIVES", "EVERYBODY", "MESSAGES", "aligned", "group_of", "on_first_clock"]

#: Operations in which every rank needs something from every other.
EVERYBODY = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "inference_all_reduce",
        "reduce_scatter",
        "reduce_scatter_coalesced",
        "reduce_scatter_tensor",
    )
)
COLLECTIVES = EVERYBODY | {"broadcast", "gather", "reduce", "scatter"}
MESSAGES = frozenset(("irecv", "isend", "recv", "send"))

Group: TypeAlias = tuple[str, tuple[int, ...]]
# How many events of a rank are looked at to find out how differently it counts.
_LOOKED_AT = 64


def group_of(operation: Operation) -> Group:
    """What is the same for all ranks of a group, and for no other group that exists at the time."""
    return operation.group, operation.ranks


def on_first_clock(trace: RankTrace) -> RankTrace:
    """``trace`` with all times on rank 0's clock; sorted by their beginning."""
    offset, at, drift = trace.offset_ns, trace.offset_at_ns, trace.drift

    def there(time_ns: int) -> int:
        return time_ns - offset - round(drift * (time_ns - at))

    events = [
        replace(
            event,
            begin_ns=there(event.begin_ns),
            end_ns=there(event.end_ns),
            returned_ns=there(event.returned_ns),
            waits=[Wait(there(wait.begin_ns), there(wait.end_ns)) for wait in event.waits],
        )
        for event in trace.events
    ]
    events.sort(key=lambda event: event.begin_ns)
    return replace(trace, events=events, offset_ns=0, offset_at_ns=0, drift=0.0)


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces on rank 0's clock, with sequence numbers that mean the same call on every rank of a group.

    Ranks that began to record at different calls count differently; such a rank's numbers are moved by what makes most
    of its operations the same as, and at the same time as, those of the rank of the group that has recorded most.
    """
    moved = [on_first_clock(trace) for trace in traces]
    doubt_ns = 2 * max((trace.uncertainty_ns for trace in traces), default=0)
    groups: dict[Group, dict[int, list[Event]]] = defaultdict(dict)
    for place, trace in enumerate(moved):
        for event in trace.events:
            if event.operation.operation in COLLECTIVES and event.sequence >= 0:
                groups[group_of(event.operation)].setdefault(place, []).append(event)
    for members in groups.values():
        most = max(members, key=lambda place: len(members[place]))
        counted = {event.sequence: event for event in members[most]}
        for place, events in members.items():
            shift = 0 if place == most else _shift(counted, events, doubt_ns)
            for event in events if shift else ():
                event.sequence += shift  # a copy of our own
    return moved


def _shift(counted: Mapping[int, Event], events: Sequence[Event], doubt_ns: int) -> int:
    """What to add to the sequence numbers of ``events``; 0 where that is as good as anything."""
    step = max(len(events) // _LOOKED_AT, 1)
    sample = events[::step][:_LOOKED_AT]
    agreeing = _agreeing(counted, sample, 0, doubt_ns)
    if agreeing == sum(event.sequence in counted for event in sample) and agreeing:
        return 0
    votes: Counter[int] = Counter()
    by_begin = sorted(counted.values(), key=lambda event: event.begin_ns)
    for event in sample:
        for other in _overlapping(by_begin, event, doubt_ns):
            votes[other.sequence - event.sequence] += 1
    best, most = 0, agreeing
    for shift, _ in votes.most_common(8):
        found = _agreeing(counted, sample, shift, doubt_ns)
        if found > most:
            best, most = shift, found
    return best


def _overlapping(by_begin: Sequence[Event], event: Event, doubt_ns: int) -> Iterable[Event]:
    return (other for other in by_begin if _same(other, event, doubt_ns))


def _agreeing(counted: Mapping[int, Event], events: Iterable[Event], shift: int, doubt_ns: int) -> int:
    found = ((counted.get(event.sequence + shift), event) for event in events)
    return sum(other is not None and _same(other, event, doubt_ns) for other, event in found)


def _same(one: Event, other: Event, doubt_ns: int) -> bool:
    """Whether two ranks may have recorded one and the same call."""
    if _signature(one.operation) != _signature(other.operation):
        return False
    if one.operation.operation not in EVERYBODY:
        return True
    # Nobody is through before everybody has begun.
    return one.begin_ns <= other.end_ns + doubt_ns and other.begin_ns <= one.end_ns + doubt_ns


def _signature(operation: Operation) -> tuple[object, ...]:
    # Uneven exchanges are of different sizes on every rank; names are anybody's own.
    size = -1 if operation.operation in ("all_to_all", "all_to_all_single") else operation.size_bytes
    return operation.operation, size, operation.dtype, operation.op, operation.root
