"""Division of communication time into waiting and transfer, and the ranks that others waited for.

A rank waits from its own call until the last of those that it needs has called too; all the rest of the operation's
time is transfer, so that the two make up the whole. It needs

* everybody in all_reduce, all_gather, reduce_scatter, all_to_all and barrier;
* the root in broadcast and scatter; the root needs everybody in reduce and gather;
* the sender, to receive; the receiver, to send, and the root, for what the others give it in reduce and gather, unless
  the call was over before that: then the library has kept the data.

Who is late because it was itself waiting for somebody passes that part of the blame on.

Numbers of calls may differ between ranks: what counts are operations of which every rank that is needed has a record,
and whose records can be of one call: of one kind and size, and so that nobody was through before those that it needs
had begun.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest
from typing import NamedTuple, TypeAlias

from comm_utils.observability.traces.alignment import channel_of, is_nothing, matches, signature_of
from comm_utils.observability.traces.events import Event, Operation, RankTrace

__all__ = ["Account", "Key", "Share", "Straggler", "account", "divided", "key_of", "split", "together"]


class Key(NamedTuple):
    """Calls that are accounted together have these in common; see ``events.Operation``."""

    name: str
    operation: str
    size_bytes: int
    ranks: tuple[int, ...]
    caller: str
    method: str = ""


# From when to when, ns, a rank waited for which other.
Stretch: TypeAlias = tuple[int, int, int]
# How often blame is passed on.
_MOST_PASSED = 64


@dataclass
class Share:
    """The time that one rank spent in operations that are alike, ns; ``total_ns`` is the sum of the other two."""

    calls: int = 0
    total_ns: int = 0
    waiting_ns: int = 0

    @property
    def transfer_ns(self) -> int:
        """Return the time that was not waiting."""
        return self.total_ns - self.waiting_ns


@dataclass
class Straggler:
    """The delays that one rank caused for others.

    Attributes:
        last: of how many operations it was the last that others needed.
        caused_ns: the sum of what all others waited because of it.
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
        """Return the lateness that calls with half of the total lateness reach or exceed.

        So many calls that are hardly late do not hide few that are.
        """
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
    """Return the key that ``operation`` is accounted under."""
    return Key(
        operation.name, operation.operation, operation.size_bytes, operation.ranks, operation.caller, operation.method
    )


def account(traces: Sequence[RankTrace]) -> Account:
    """Account for everything in ``traces``, which are aligned."""
    shares: dict[int, dict[Key, Share]] = {trace.rank: {} for trace in traces}
    late: dict[int, Straggler] = {trace.rank: Straggler(trace.rank, trace.host, trace.pid) for trace in traces}
    operations = matched = 0
    stretches: list[tuple[int, Stretch]] = []
    held_up = _HeldUp()
    for calls, waited in divided(traces):
        operations += 1
        matched += len(waited)
        for rank, (waiting_ns, waited_for) in waited.items():
            event = calls[rank]
            share = shares[rank].setdefault(key_of(event.operation), Share())
            share.calls += 1
            share.total_ns += event.duration_ns
            share.waiting_ns += waiting_ns
            if waiting_ns:
                stretch = event.begin_ns, event.begin_ns + waiting_ns, waited_for
                stretches.append((rank, stretch))
                if not event.operation.asynchronous:  # nothing else was done meanwhile
                    held_up.add(rank, stretch)
        last_two = nlargest(2, calls, key=lambda rank: calls[rank].begin_ns)
        for rank in {waited_for for waiting_ns, waited_for in waited.values() if waiting_ns}:
            one = late[rank]
            one.last += 1
            before = calls[last_two[last_two[0] == rank]].begin_ns
            one.late_ns.append(max(calls[rank].begin_ns - before, 0))
    for _, (begin_ns, end_ns, waited_for) in stretches:
        for rank, caused_ns in held_up.blame(waited_for, begin_ns, end_ns):
            late[rank].caused_ns += caused_ns
    found = sorted((one for one in late.values() if one.caused_ns), key=lambda one: -one.caused_ns)
    return Account(shares, found, operations, sum(len(trace.events) for trace in traces) - matched)


class _HeldUp:
    """The times when each rank was held up, and the rank that it waited for."""

    def __init__(self) -> None:
        self._of: dict[int, list[Stretch]] = defaultdict(list)
        self._sorted = False

    def add(self, rank: int, stretch: Stretch) -> None:
        self._of[rank].append(stretch)

    def blame(self, rank: int, begin_ns: int, end_ns: int, passed: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the ranks that delayed ``rank`` between these times, each with its share, ns."""
        if not self._sorted:
            for stretches in self._of.values():
                stretches.sort()
            self._sorted = True
        own_ns = end_ns - begin_ns
        stretches = self._of.get(rank, [])
        if passed < _MOST_PASSED:
            # A rank is in one synchronous call at a time, so stretches follow one another, and so do their ends.
            place = max(bisect_right(stretches, begin_ns, key=lambda stretch: stretch[0]) - 1, 0)
            while place < len(stretches) and stretches[place][0] < end_ns:
                first, last, other = stretches[place]
                first, last = max(first, begin_ns), min(last, end_ns)
                if last > first:
                    own_ns -= last - first
                    yield from self.blame(other, first, last, passed + 1)
                begin_ns = max(begin_ns, last)  # threads may be in two at a time
                place += 1
        if own_ns:
            yield rank, own_ns


def divided(traces: Sequence[RankTrace]) -> Iterator[tuple[dict[int, Event], dict[int, tuple[int, int]]]]:
    """Yield the events of each operation in ``traces`` that can be divided, and what :func:`split` returns for them."""
    doubt_ns = 2 * max((trace.uncertainty_ns for trace in traces), default=0)
    for calls in together(traces):
        if waited := split(calls, doubt_ns):
            yield calls, waited


def together(traces: Sequence[RankTrace]) -> Iterator[dict[int, Event]]:
    """Yield the events of each operation, by global rank."""
    calls: dict[tuple[object, ...], dict[int, Event]] = {}
    for trace in traces:
        for event in trace.events:
            if event.sequence >= 0:
                calls.setdefault((channel_of(trace.rank, event.operation), event.sequence), {})[trace.rank] = event
    yield from calls.values()


def split(calls: Mapping[int, Event], doubt_ns: int = 0) -> dict[int, tuple[int, int]]:
    """Return how long each rank waited in one operation, ns, and for which rank.

    Args:
        calls: by global rank, all of one group.
        doubt_ns: how wrong the clocks may be.

    Returns:
        Only ranks of which everyone that they need is in ``calls``, and has made the same call as far as one can see.
    """
    found = {}
    everyone: _Everyone | None = None
    members: frozenset[int] = frozenset(next(iter(calls.values())).operation.ranks) if calls else frozenset()
    for rank, event in calls.items():
        # What every rank needs of all others is compared once for all of them, not once a pair.
        if event.operation.pattern.is_symmetric and not is_nothing(event.operation) and rank in members:
            if everyone is None:
                everyone = _Everyone(calls, members, doubt_ns)
            last = everyone.last_for(rank, event)
        else:
            last = _last_for(rank, event, calls, members, doubt_ns)
        if last is not None:
            # No longer than the operation itself, which only an error of the clocks would make it.
            waiting_ns = min(max(calls[last].begin_ns - event.begin_ns, 0), max(event.duration_ns, 0))
            found[rank] = waiting_ns, last
    return found


class _Everyone:
    """The calls of a whole group in which every rank needs all others."""

    def __init__(self, calls: Mapping[int, Event], members: Set[int], doubt_ns: int) -> None:
        self._doubt_ns = doubt_ns
        # Whether all have made the same call; the times of each rank are compared in :meth:`last_for`.
        self._are_alike = (
            members <= calls.keys() and len({signature_of(calls[rank].operation) for rank in members}) == 1
        )
        if self._are_alike:
            self._last = nlargest(2, members, key=lambda rank: (calls[rank].begin_ns, -rank))
            self._begins = [calls[rank].begin_ns for rank in self._last]
            self._first_through = nsmallest(2, members, key=lambda rank: calls[rank].end_ns)
            self._ends = [calls[rank].end_ns for rank in self._first_through]

    def last_for(self, rank: int, event: Event) -> int | None:
        """Return the rank that called last; None where these cannot be the records of one call of ``rank``."""
        if not self._are_alike:
            return None
        if len(self._last) > 1:
            # Nobody was through before another had begun; a rank is not compared with itself.
            last_begin_ns = self._begins[self._last[0] == rank]
            first_end_ns = self._ends[self._first_through[0] == rank]
            if event.end_ns + self._doubt_ns < last_begin_ns or first_end_ns + self._doubt_ns < event.begin_ns:
                return None
        return self._last[0]


def _last_for(rank: int, event: Event, calls: Mapping[int, Event], members: Set[int], doubt_ns: int) -> int | None:
    """Return the rank that called last of those that ``rank`` needs; None where one of them has not made this call."""
    needed = _needed(rank, event, calls, members)
    if not needed <= calls.keys():
        return None
    if any(not matches(rank, event, other, calls[other], doubt_ns) for other in needed if other != rank):
        return None
    return max(needed, key=lambda one: (calls[one].begin_ns, -one))


def _needed(rank: int, event: Event, calls: Mapping[int, Event], members: Set[int]) -> set[int]:
    operation = event.operation
    if is_nothing(operation):
        return {rank}
    if sources := operation.pattern.sources(rank, members, operation.root):
        return sources | {rank}
    # What was given away before the other side asked for it was kept by the library.
    targets = operation.pattern.targets(rank, members, operation.root)
    return {rank} | {one for one in targets if one not in calls or calls[one].begin_ns <= event.end_ns}
