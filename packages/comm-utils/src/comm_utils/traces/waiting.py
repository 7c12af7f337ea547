"""Where the time of communication went: waiting for others to call, or transferring; and who was waited for.

A rank waits from its own call until the last of those that it needs has called too; all the rest of the operation's
time is transfer, so that the two make up the whole. It needs

* everybody in all_reduce, all_gather, reduce_scatter, all_to_all and barrier;
* the root in broadcast and scatter; the root needs everybody in reduce and gather;
* the sender, to receive; the receiver, to send, and the root, for what the others give it in reduce and gather, unless
  the call was over before that: then the library has kept the data.

Numbers of calls may differ between ranks: what counts are operations of which every rank that is needed has a record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from comm_utils.traces.alignment import COLLECTIVES, EVERYBODY, Group, group_of
from comm_utils.traces.events import Event, Operation, RankTrace

__all__ = ["Account", "Key", "Share", "Straggler", "account", "key_of", "split", "together"]

#: What is accounted together: name, operation, size in bytes, the group's ranks, caller.
Key: TypeAlias = tuple[str, str, int, tuple[int, ...], str]


@dataclass
class Share:
    """The time that one rank spent in operations that are alike, ns; ``total_ns`` is the sum of the other two."""

    calls: int = 0
    total_ns: int = 0
    waiting_ns: int = 0

    @property
    def transfer_ns(self) -> int:
        """What was not waiting."""
        return self.total_ns - self.waiting_ns


@dataclass
class Straggler:
    """How one rank kept others waiting.

    Attributes:
        last: of how many operations it was the last that others needed.
        caused_ns: the sum of what all others waited for it.
        late_ns: for each of these operations, how much later it called than the one before it did.
    """

    rank: int
    host: str = ""
    pid: int = 0
    last: int = 0
    caused_ns: int = 0
    late_ns: list[int] = field(default_factory=list)

    @property
    def typical_late_ns(self) -> int:
        """At least so late it was for half of all that it was late: many calls that are hardly late do not hide few
        that are."""
        half, so_far = sum(self.late_ns) / 2, 0
        for late_ns in sorted(self.late_ns, reverse=True):
            so_far += late_ns
            if so_far >= half:
                return late_ns
        return 0


@dataclass
class Account:
    """Of all ranks.

    Attributes:
        shares: rank -> what is alike -> its time.
        stragglers: ranks that others waited for, who caused most first.
        operations: how many operations are accounted for, each counted once.
        unmatched: events without the record of a rank that they need, which are not.
    """

    shares: dict[int, dict[Key, Share]]
    stragglers: list[Straggler]
    operations: int
    unmatched: int


def key_of(operation: Operation) -> Key:
    """What ``operation`` is accounted under."""
    return operation.name, operation.operation, operation.size_bytes, operation.ranks, operation.caller


def account(traces: Sequence[RankTrace]) -> Account:
    """Account for everything in ``traces``, which are aligned."""
    shares: dict[int, dict[Key, Share]] = {trace.rank: {} for trace in traces}
    late: dict[int, Straggler] = {trace.rank: Straggler(trace.rank, trace.host, trace.pid) for trace in traces}
    operations = matched = 0
    for calls in together(traces):
        waited = split(calls)
        if not waited:
            continue
        operations += 1
        matched += len(waited)
        blamed: dict[int, int] = defaultdict(int)
        for rank, (waiting_ns, waited_for) in waited.items():
            event = calls[rank]
            share = shares[rank].setdefault(key_of(event.operation), Share())
            share.calls += 1
            share.total_ns += event.duration_ns
            share.waiting_ns += waiting_ns
            if waiting_ns:
                blamed[waited_for] += waiting_ns
        for rank, caused_ns in blamed.items():
            one = late[rank]
            one.last += 1
            one.caused_ns += caused_ns
            others = [event.begin_ns for other, event in calls.items() if other != rank]
            one.late_ns.append(max(calls[rank].begin_ns - max(others), 0))
    found = sorted((one for one in late.values() if one.last), key=lambda one: -one.caused_ns)
    return Account(shares, found, operations, sum(len(trace.events) for trace in traces) - matched)


def together(traces: Sequence[RankTrace]) -> Iterator[dict[int, Event]]:
    """What the ranks recorded of each operation, by global rank."""
    calls: dict[tuple[object, ...], dict[int, Event]] = {}
    for trace in traces:
        for event in trace.events:
            if event.sequence >= 0:
                calls.setdefault((*_identity(trace.rank, event),), {})[trace.rank] = event
    yield from calls.values()


def _identity(rank: int, event: Event) -> tuple[Group, int] | tuple[Group, int, tuple[int, int, int]]:
    operation = event.operation
    if operation.operation in COLLECTIVES:
        return group_of(operation), event.sequence
    sends = operation.operation.endswith("send")
    source, target = (rank, operation.root) if sends else (operation.root, rank)
    return group_of(operation), event.sequence, (source, target, operation.tag)


def split(calls: Mapping[int, Event]) -> dict[int, tuple[int, int]]:
    """How long each rank waited in one operation, ns, and for which rank.

    Args:
        calls: by global rank.

    Returns:
        Only ranks of which everyone that they need is in ``calls``; nothing where the ranks did not make the same call.
    """
    if len({_kind(event.operation) for event in calls.values()}) > 1:
        return {}
    found = {}
    for rank, event in calls.items():
        needed = set(_needed(rank, event, calls))
        if not needed <= calls.keys():
            continue
        last = max(sorted(needed), key=lambda one: calls[one].begin_ns)
        # No longer than the operation itself, which only an error of the clocks would make it.
        waiting_ns = min(max(calls[last].begin_ns - event.begin_ns, 0), max(event.duration_ns, 0))
        found[rank] = waiting_ns, last
    return found


def _kind(operation: Operation) -> tuple[str, int]:
    if operation.operation in COLLECTIVES:
        return operation.operation, operation.root
    return "message", -1


def _needed(rank: int, event: Event, calls: Mapping[int, Event]) -> Iterable[int]:
    operation, root = event.operation.operation, event.operation.root
    if operation in EVERYBODY:
        return event.operation.ranks
    if operation in ("broadcast", "scatter", "recv", "irecv"):
        return rank, root
    if operation in ("reduce", "gather") and rank == root:
        return event.operation.ranks
    # What was given away before the other side asked for it was kept by the library.
    kept = root in calls and calls[root].begin_ns > event.end_ns
    return (rank,) if kept else (rank, root)
