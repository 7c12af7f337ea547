"""Puts the traces of several ranks side by side: one clock, and one count of the collectives of each group."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from comm_utils.observability.sequence import epoch_of
from comm_utils.observability.traces.events import Event, Operation, RankTrace, Wait

__all__ = [
    "Group",
    "aligned",
    "channel_of",
    "group_of",
    "is_nothing",
    "matches",
    "on_first_clock",
    "signature_of",
]

Group: TypeAlias = tuple[str, tuple[int, ...]]
# How many events of a rank are looked at to find out how differently it counts.
_LOOKED_AT = 64
# So many that end before and after it may be the same call, and so many times closer is much closer.
_NEIGHBOURS, _MUCH = 4, 4


def group_of(operation: Operation) -> Group:
    """Return a key that all ranks of a group share, and no other group that exists at the time."""
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


def is_nothing(operation: Operation) -> bool:
    """Return whether there is nothing to communicate, and so nobody waits for anybody."""
    return operation.size_bytes == 0 and not operation.pattern.is_empty


def channel_of(rank: int, operation: Operation) -> tuple[object, ...]:
    """Return the channel that counts a call of ``rank``: a group's collectives, or messages between two ranks."""
    pattern = operation.pattern
    if not pattern.is_message:
        return group_of(operation)
    source, target = (rank, operation.root) if pattern.is_send else (operation.root, rank)
    return *group_of(operation), source, target, operation.tag


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces on rank 0's clock, with sequence numbers that mean the same call on every rank of a group.

    Ranks that began to record at different calls count differently, unless they began to count together and none has
    paused since. The numbers of such a rank are moved, epoch by epoch, by the difference that makes most of its calls
    the same as those of the rank that has recorded most, and among equals by the one that makes them end closest to
    each other.
    """
    moved = [on_first_clock(trace) for trace in traces]
    together = all(trace.counted_together for trace in traces)
    doubt_ns = 2 * max((trace.uncertainty_ns for trace in traces), default=0)
    channels: dict[tuple[object, ...], dict[int, dict[int, list[Event]]]] = defaultdict(dict)
    for trace in moved:
        for event in trace.events:
            if event.sequence >= 0:
                epochs = channels[channel_of(trace.rank, event.operation)].setdefault(trace.rank, {})
                epochs.setdefault(epoch_of(event.sequence), []).append(event)
    for members in channels.values():
        if len(members) < 2 or (together and len({epoch for epochs in members.values() for epoch in epochs}) == 1):
            continue
        most = max(members, key=lambda rank: sum(map(len, members[rank].values())))
        counted = {event.sequence: event for events in members[most].values() for event in events}
        for rank, epochs in members.items():
            for epoch, events in epochs.items() if rank != most else ():
                if together and epoch in members[most]:
                    continue
                shift = _shift(most, counted, rank, events, doubt_ns)
                for event in events if shift else ():
                    event.sequence += shift  # a copy of our own
    return moved


def _shift(most: int, counted: Mapping[int, Event], rank: int, events: Sequence[Event], doubt_ns: int) -> int:
    """Return the difference to add to the sequence numbers of ``events``; 0 where nothing is better."""
    step = max(len(events) // _LOOKED_AT, 1)
    sample = events[::step][:_LOOKED_AT]

    def judged(shift: int) -> tuple[int, int]:
        """Return how many may be the same call, and how far apart these end."""
        pairs = [(counted.get(event.sequence + shift), event) for event in sample]
        good = [(one, event) for one, event in pairs if one is not None and matches(most, one, rank, event, doubt_ns)]
        return len(good), sum(abs(one.end_ns - event.end_ns) for one, event in good)

    # Candidates are what ends at about the same time.
    by_end = sorted((event.end_ns, number) for number, event in counted.items())
    ends = [end_ns for end_ns, _ in by_end]
    votes: Counter[int] = Counter()
    for event in sample:
        place = bisect_left(ends, event.end_ns)
        for _, number in by_end[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS]:
            if matches(most, counted[number], rank, event, doubt_ns):
                votes[number - event.sequence] += 1
    best, found = 0, judged(0)
    for shift, _ in votes.most_common(2 * _NEIGHBOURS):
        other = judged(shift)
        # Equally many have to be much closer, as ranks are late for reasons of their own.
        if other[0] > found[0] or (other[0] == found[0] and _MUCH * other[1] < found[1]):
            best, found = shift, other
    return best


def matches(rank: int, event: Event, other: int, others: Event, doubt_ns: int = 0) -> bool:
    """Return whether two ranks of a group may have recorded one and the same call.

    Args:
        doubt_ns: how wrong their clocks may be.
    """
    mine, theirs = event.operation, others.operation
    if signature_of(mine) != signature_of(theirs):
        return False

    if is_nothing(mine):
        return True

    def ends_after(needs: Event, needed: Event) -> bool:
        return needs.end_ns + doubt_ns >= needed.begin_ns

    pattern = mine.pattern
    if pattern.is_message:
        if pattern.is_send == theirs.pattern.is_send:
            return False
        return ends_after(others, event) if pattern.is_send else ends_after(event, others)
    needs, is_needed = pattern.needs(rank, other, mine.root), pattern.needs(other, rank, mine.root)
    return (not needs or ends_after(event, others)) and (not is_needed or ends_after(others, event))


def signature_of(operation: Operation) -> tuple[object, ...]:
    """Return the properties that the records of one call have in common on all ranks."""
    if operation.pattern.is_message:
        return "message", operation.size_bytes
    # Uneven exchanges have different sizes on every rank; each rank chooses its own names.
    size = -1 if operation.pattern.uneven else operation.size_bytes
    return operation.operation, size, operation.dtype, operation.op, operation.root
