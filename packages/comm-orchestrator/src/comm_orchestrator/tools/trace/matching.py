"""Matching of the calls of several ranks, and detection of incomplete ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.alignment import group_of
from comm_utils.sizes import format_size

__all__ = ["kind_of", "matched"]

Calls: TypeAlias = dict[int, Event]


def kind_of(operation: Operation) -> str:
    """Return the operation that is the same for the network, and that a replay calls."""
    row = operations.get(operation.operation)
    return row.name if row.pattern.is_message else row.measured_as


def matched(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """``traces``, which are aligned, with those calls only whose other ranks have a record of them too.

    Whatever else is left out, the order of what remains is one in which the ranks have run. Both ends of a message get
    a sequence number that no other has, and receives from anybody the sender whose message was of their size.

    Raises:
        ArgumentError: ranks recorded different calls as the same one.
    """
    kept: set[int] = set()
    for calls in _collectives(traces):
        _check(calls)
        if calls.keys() == set(next(iter(calls.values())).operation.ranks):
            kept.update(map(id, calls.values()))
    ends = _messages(traces)
    found = []
    for trace in traces:
        events = []
        for event in trace.events:
            end = ends.get(id(event))
            if end is not None:
                other, number = end
                event = replace(event, operation=replace(event.operation, root=other), sequence=number)
            if end is not None or id(event) in kept:
                events.append(event)
        found.append(replace(trace, events=events))
    return found


def _collectives(traces: Sequence[RankTrace]) -> Iterator[Calls]:
    calls: dict[tuple[object, ...], Calls] = defaultdict(dict)
    for trace in traces:
        for event in trace.events:
            if not event.operation.pattern.is_message and event.sequence >= 0:
                key = (group_of(event.operation), event.sequence)
                if trace.rank in calls[key]:
                    raise ArgumentError(
                        f"rank {trace.rank} has two calls with the number {event.sequence} in the group "
                        f"{list(event.operation.ranks)}: {calls[key][trace.rank].operation.name} and "
                        f"{event.operation.name}"
                    )
                calls[key][trace.rank] = event
    yield from calls.values()


def _check(calls: Calls) -> None:
    first = min(calls)
    wanted = _what(calls[first].operation)
    for rank, event in calls.items():
        if _what(event.operation) != wanted:
            raise ArgumentError(
                f"call {event.sequence} of the group {list(event.operation.ranks)} is {_told(calls[first])} on rank "
                f"{first} and {_told(event)} on rank {rank}: these recordings do not match up"
            )


def _what(operation: Operation) -> tuple[object, ...]:
    # Uneven exchanges are of different sizes on every rank.
    size = -1 if operation.pattern.uneven else operation.size_bytes
    return kind_of(operation), size, operation.dtype, operation.op, operation.root


def _told(event: Event) -> str:
    operation = event.operation
    words = [operation.operation, "of", format_size(operation.size_bytes), operation.dtype, operation.op]
    return " ".join(word for word in words if word) + (f" with root {operation.root}" if operation.root >= 0 else "")


class _Pairs:
    """Messages with both ends."""

    def __init__(self) -> None:
        #: ``id`` of an event -> the rank at the other end, and the number of the message
        self.ends: dict[int, tuple[int, int]] = {}

    def add(self, source: int, send: Event, target: int, receive: Event) -> None:
        number = len(self.ends) // 2
        self.ends[id(send)] = target, number
        self.ends[id(receive)] = source, number


def _messages(traces: Sequence[RankTrace]) -> dict[int, tuple[int, int]]:
    """Of messages with both ends, by the ``id`` of their events: the rank at the other end, and a number."""
    sends: dict[tuple[object, ...], tuple[int, Event]] = {}
    receives: list[tuple[int, Event]] = []
    for trace in traces:
        for event in trace.events:
            operation = event.operation
            if operation.pattern.is_send:
                key = (group_of(operation), trace.rank, operation.root, operation.tag, event.sequence)
                sends[key if event.sequence >= 0 and key not in sends else (*key, id(event))] = trace.rank, event
            elif operation.pattern.is_receive:
                receives.append((trace.rank, event))
    pairs = _Pairs()
    late: list[tuple[int, Event]] = []
    for rank, event in receives:
        operation = event.operation
        key = (group_of(operation), operation.root, rank, operation.tag, event.sequence)
        send = sends.get(key) if operation.root >= 0 and event.sequence >= 0 else None
        if send is None or send[1].operation.size_bytes != operation.size_bytes:
            late.append((rank, event))
            continue
        del sends[key]
        pairs.add(*send, rank, event)
    _pair_up(late, list(sends.values()), pairs)
    return pairs.ends


def _pair_up(receives: Sequence[tuple[int, Event]], sends: Sequence[tuple[int, Event]], pairs: _Pairs) -> None:
    """Receives that say not which message they got, with sends that nobody else got, in the order of time."""
    left: dict[tuple[object, ...], list[tuple[int, Event]]] = defaultdict(list)
    for source, send in sorted(sends, key=lambda one: -one[1].begin_ns):
        operation = send.operation
        left[group_of(operation), operation.root, operation.tag, operation.size_bytes].append((source, send))
    for rank, event in sorted(receives, key=lambda one: one[1].end_ns):
        operation = event.operation
        waiting = left.get((group_of(operation), rank, operation.tag, operation.size_bytes), [])
        for place in range(len(waiting) - 1, -1, -1):
            source, send = waiting[place]
            if operation.root in (-1, source):
                del waiting[place]
                pairs.add(source, send, rank, event)
                break
