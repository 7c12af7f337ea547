"""What each rank of a recorded job did, as steps that can be gone through with other times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.alignment import MESSAGES

__all__ = ["Exchange", "Program", "Step", "programs"]

_SENDS = frozenset(("send", "isend"))


@dataclass
class Exchange:
    """One collective, or one message, on all ranks that recorded it.

    Attributes:
        queue: exchanges of one queue go one after another: a group's, or one direction between two ranks.
        ranks: who recorded it.
        transfer_ns: the least time that any rank spent in it, which waited for nobody.
    """

    operation: Operation
    queue: object
    ranks: set[int] = field(default_factory=set)
    sender: int = -1
    transfer_ns: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """A rank computes for ``gap_ns``, then calls or waits.

    Attributes:
        kind: ``call``, ``start`` (asynchronous) or ``wait``.
        own_ns: what it takes the rank itself beside the transfer: to start it, or to finish it after the wait.
    """

    kind: str
    exchange: Exchange
    gap_ns: int
    own_ns: int = 0


@dataclass(frozen=True)
class Program:
    """The steps of one rank; ``begin_ns`` after the first rank's first step."""

    rank: int
    begin_ns: int
    steps: list[Step]


def programs(traces: Sequence[RankTrace]) -> tuple[list[Program], list[Exchange]]:
    """The programs of all ranks, and the exchanges between them.

    Args:
        traces: aligned.
    """
    exchanges: dict[object, Exchange] = {}
    origin = min((event.begin_ns for trace in traces for event in trace.events), default=0)
    found = [_program(trace, origin, exchanges) for trace in traces]
    return found, list(exchanges.values())


def _program(trace: RankTrace, origin: int, exchanges: dict[object, Exchange]) -> Program:
    moments: list[tuple[int, int, str, Exchange, int]] = []
    for number, event in enumerate(trace.events):
        exchange = _exchange(trace.rank, number, event, exchanges)
        if not event.operation.asynchronous:
            moments.append((event.begin_ns, event.end_ns, "call", exchange, 0))
            continue
        moments.append((event.begin_ns, event.returned_ns, "start", exchange, event.returned_ns - event.begin_ns))
        for wait in event.waits:
            after = wait.end_ns - max(wait.begin_ns, min(event.end_ns, wait.end_ns))
            moments.append((wait.begin_ns, wait.end_ns, "wait", exchange, after))
    moments.sort(key=lambda moment: moment[:2])
    steps = []
    last = moments[0][0] if moments else origin
    for begin, end, kind, exchange, own in moments:
        # Calls of several threads overlap: what goes on at the same time is no computing.
        steps.append(Step(kind, exchange, max(0, begin - last), max(0, own)))
        last = max(last, end)
    return Program(trace.rank, moments[0][0] - origin if moments else 0, steps)


def _exchange(rank: int, number: int, event: Event, exchanges: dict[object, Exchange]) -> Exchange:
    operation, duration = event.operation, max(0, event.duration_ns)
    key: object
    queue: object
    if operation.operation in MESSAGES:
        sender = rank if operation.operation in _SENDS else operation.root
        receiver = operation.root if operation.operation in _SENDS else rank
        queue = (sender, receiver)
        known = event.sequence >= 0 and operation.root >= 0
        key = (queue, operation.tag, event.sequence) if known else (rank, number)
    else:
        sender, queue = -1, (operation.group, operation.ranks)
        key = (queue, event.sequence) if event.sequence >= 0 else (rank, number)
    exchange = exchanges.get(key)
    if exchange is None:
        exchange = exchanges[key] = Exchange(operation, queue, sender=sender, transfer_ns=duration)
    exchange.ranks.add(rank)
    exchange.transfer_ns = min(exchange.transfer_ns, duration)
    # Uneven exchanges are of different sizes on every rank; the greatest takes longest.
    exchange.size_bytes = max(exchange.size_bytes, operation.size_bytes)
    return exchange
