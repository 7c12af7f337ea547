"""Bytes from rank to rank over a whole trace, by what :mod:`.traffic_model` says of each operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from comm_utils.observability.traces.alignment import group_of
from comm_utils.observability.traces.events import Event, Operation, RankTrace
from comm_utils.observability.traces.traffic_model import received, sent

__all__ = ["Traffic", "traffic"]


@dataclass
class Traffic:
    """Bytes between ranks.

    Attributes:
        bytes_sent: (W, W); ``[i][j]`` is what rank i sent to rank j.
        without_source_bytes: received from nobody knows whom: a receive from anybody whose sender's record is missing.
    """

    bytes_sent: list[list[int]] = field(default_factory=list)
    without_source_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes that all ranks sent."""
        return sum(map(sum, self.bytes_sent))


def traffic(traces: Iterable[RankTrace]) -> Traffic:
    """Return the bytes that each rank sent to each other, each message counted once.

    The sender's record counts; where it is missing, because its recording was cut off, the receiver's does.

    Args:
        traces: of all ranks of the job; clocks do not matter.
    """
    traces = list(traces)
    W = max((trace.world_size for trace in traces), default=0)
    found = Traffic([[0] * W for _ in range(W)])
    for trace in traces:
        for operation, calls in Counter(event.operation for event in trace.events).items():
            for other, size in sent(operation, trace.rank).items():
                found.bytes_sent[trace.rank][other] += size * calls
    _add_unsent(found, traces)
    return found


def _add_unsent(found: Traffic, traces: Sequence[RankTrace]) -> None:
    """Add messages that receivers recorded and senders did not."""
    sent_keys: set[tuple[object, ...]] = set()
    receives: list[tuple[int, Event]] = []
    calls: dict[tuple[object, ...], dict[int, Operation]] = {}
    for trace in traces:
        for event in trace.events:
            operation = event.operation
            if operation.pattern.is_receive:
                receives.append((trace.rank, event))
            elif operation.pattern.is_message:
                sent_keys.add(_key(trace.rank, operation.root, event))
            elif event.sequence >= 0:
                calls.setdefault((*group_of(operation), event.sequence), {})[trace.rank] = operation
    for recorded in calls.values():
        if len(recorded) < next(iter(recorded.values())).world_size:
            for here, operation in recorded.items():
                for source, size in received(operation, here).items():
                    if source not in recorded:
                        found.bytes_sent[source][here] += size
    unnumbered: Counter[tuple[_Kind, int]] = Counter()
    for here, event in receives:
        operation = event.operation
        if operation.root < 0 or event.sequence < 0:
            unnumbered[_kind(operation, here), operation.root] += 1
        elif _key(operation.root, here, event) not in sent_keys:
            found.bytes_sent[operation.root][here] += operation.size_bytes
    if unnumbered:
        _add_unnumbered(found, _untaken(traces), unnumbered)


def _key(source: int, target: int, event: Event) -> tuple[object, ...]:
    """Return a key that both ends of a message share."""
    return group_of(event.operation), event.sequence, source, target, event.operation.tag


#: Properties of a receive that does not say which message it got: group, receiver, tag, bytes.
_Kind = tuple[tuple[str, tuple[int, ...]], int, int, int]


def _kind(operation: Operation, receiver: int) -> _Kind:
    return group_of(operation), receiver, operation.tag, operation.size_bytes


def _untaken(traces: Sequence[RankTrace]) -> Counter[tuple[_Kind, int]]:
    """Count the messages of a kind that each rank has sent beyond those that numbered receives got."""
    left: Counter[tuple[_Kind, int]] = Counter()
    for trace in traces:
        for event in trace.events:
            operation, other = event.operation, event.operation.root
            if operation.pattern.is_send:
                left[_kind(operation, other), trace.rank] += 1
            elif operation.pattern.is_receive and other >= 0 and event.sequence >= 0:
                left[_kind(operation, trace.rank), other] -= 1
    return left


def _add_unnumbered(
    found: Traffic, left: Counter[tuple[_Kind, int]], unnumbered: Mapping[tuple[_Kind, int], int]
) -> None:
    """Receives without a number: as many as there are sends left are counted already."""
    for (kind, source), calls in sorted(unnumbered.items(), key=lambda item: item[0][1] < 0):
        _, receiver, _, size = kind
        if source >= 0:
            had = min(calls, max(0, left[kind, source]))
            left[kind, source] -= had
            found.bytes_sent[source][receiver] += (calls - had) * size
        else:
            had = sum(number for (one, _), number in left.items() if one == kind and number > 0)
            found.without_source_bytes += max(0, calls - had) * size
