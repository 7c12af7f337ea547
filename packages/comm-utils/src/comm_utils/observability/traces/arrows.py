"""Arrows of a Chrome trace, from each send to its receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from comm_utils.observability.traces.alignment import Group, group_of
from comm_utils.observability.traces.events import Event, RankTrace

__all__ = ["Arrows", "Message", "arrival", "call_end"]

#: group, sender, receiver, tag, sequence
Message: TypeAlias = tuple[Group, int, int, int, int]


class Arrows:
    """The ends of the arrows: where a send is, and where its receive."""

    def __init__(self, traces: Sequence[RankTrace], left_out: list[Message] | None) -> None:
        sends: dict[Message, Event] = {}
        receives: dict[Message, Event] = {}
        for trace in traces:
            for event in trace.events:
                message = message_of(trace.rank, event)
                if message is not None:
                    # Of records that have a number twice, the first has the arrow.
                    (sends if event.operation.pattern.is_send else receives).setdefault(message, event)
        #: By the event's identity: the number, the time, and the event, which is kept.
        self._ends: dict[int, tuple[int, int, Event]] = {}
        for number, message in enumerate(sorted(sends.keys() & receives.keys()), 1):
            send, receive = sends[message], receives[message]
            begin, end = arrival(receive)
            # An arrow has to end within the slice that it points to, and not before it starts.
            last = max(begin, end - 1)
            if last >= send.begin_ns:
                self._ends[id(send)] = number, send.begin_ns, send
                self._ends[id(receive)] = number, last, receive
            elif left_out is not None:
                left_out.append(message)

    def of(self, event: Event, at: dict[str, Any], origin: int) -> Iterator[dict[str, Any]]:
        """Return the arrow's end at this event; ``at`` says on which thread."""
        found = self._ends.pop(id(event), None)
        if found is not None:
            number, time_ns, _ = found
            way = {"ph": "s"} if event.operation.pattern.is_send else {"ph": "f", "bp": "e"}
            yield {**way, "cat": "message", "name": "message", "id": number, "ts": (time_ns - origin) / 1000, **at}


def message_of(rank: int, event: Event) -> Message | None:
    operation = event.operation
    if not operation.pattern.is_message or operation.root < 0 or event.sequence < 0:
        return None
    source, target = (rank, operation.root) if operation.pattern.is_send else (operation.root, rank)
    return group_of(operation), source, target, operation.tag, event.sequence


def arrival(event: Event) -> tuple[int, int]:
    """Return the slice on which a message arrives.

    The first wait that lasted until then, or else the last, or its call.
    """
    waits = event.waits
    found = next((wait for wait in waits if wait.end_ns >= event.end_ns), waits[-1] if waits else None)
    if found is not None:
        return found.begin_ns, max(found.begin_ns, found.end_ns)
    return event.begin_ns, call_end(event)


def call_end(event: Event) -> int:
    """Return when the call returned, ns."""
    return max(event.begin_ns, event.returned_ns if event.operation.asynchronous else event.end_ns)
