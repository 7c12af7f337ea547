"""Turn a recorded job into a program for each rank, and simulate it with other times for its communication."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.alignment import group_of

__all__ = ["Exchange", "Program", "Run", "Step", "programs", "simulate"]


@dataclass
class Exchange:
    """One collective, or one message, on all ranks that recorded it.

    Attributes:
        queue: exchanges of one queue go one after another: a group's, or one direction between two ranks.
        ranks: who recorded it.
        transfer_ns: the least time that any rank spent in it, after the one before it in its queue: that rank waited
            for nobody.
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
    """Return the programs of all ranks, and the exchanges between them.

    Args:
        traces: aligned.
    """
    exchanges: dict[object, Exchange] = {}
    origin = min((event.begin_ns for trace in traces for event in trace.events), default=0)
    found = [_program(trace, origin, exchanges) for trace in traces]
    return found, list(exchanges.values())


def _program(trace: RankTrace, origin: int, exchanges: dict[object, Exchange]) -> Program:
    moments: list[tuple[int, int, str, Exchange, int]] = []
    over: dict[object, int] = {}  # until when this rank has seen each queue at work
    for number, event in enumerate(trace.events):
        exchange = _exchange(trace.rank, number, event, exchanges, over)
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


def _exchange(
    rank: int, number: int, event: Event, exchanges: dict[object, Exchange], over: dict[object, int]
) -> Exchange:
    operation = event.operation
    key: object
    queue: object
    if operation.pattern.is_message:
        sender = rank if operation.pattern.is_send else operation.root
        receiver = operation.root if operation.pattern.is_send else rank
        queue = (sender, receiver)
        known = event.sequence >= 0 and operation.root >= 0
        key = (group_of(operation), queue, operation.tag, event.sequence) if known else (rank, number)
    else:
        sender, queue = -1, group_of(operation)
        key = (queue, event.sequence) if event.sequence >= 0 else (rank, number)
    # What an asynchronous operation stood behind earlier ones is their time.
    duration = max(0, event.end_ns - max(event.begin_ns, over.get(queue, event.begin_ns)))
    over[queue] = max(event.end_ns, over.get(queue, event.end_ns))
    exchange = exchanges.get(key)
    if exchange is None:
        exchange = exchanges[key] = Exchange(operation, queue, sender=sender, transfer_ns=duration)
    exchange.ranks.add(rank)
    exchange.transfer_ns = min(exchange.transfer_ns, duration)
    # Uneven exchanges are of different sizes on every rank; the greatest takes longest.
    exchange.size_bytes = max(exchange.size_bytes, operation.size_bytes)
    return exchange


@dataclass(frozen=True)
class Run:
    """The result of a simulation.

    Attributes:
        wall_ns: from the first rank's first call to the end of all steps and exchanges.
        lonely: exchanges that had to go on without ranks that recorded them, because nothing else could.
    """

    wall_ns: float
    lonely: int = 0


@dataclass
class _State:
    called: dict[int, float] = field(default_factory=dict)
    end_ns: float | None = None
    waiting: list[int] = field(default_factory=list)


class _Simulation:
    def __init__(self, programs: Sequence[Program], durations_ns: Mapping[int, float]) -> None:
        self.programs = {program.rank: program for program in programs}
        self.durations_ns = durations_ns
        self.states: dict[int, _State] = defaultdict(_State)
        self.exchanges: dict[int, Exchange] = {}
        self.free_ns: dict[object, float] = defaultdict(float)
        self.clock_ns = {program.rank: float(program.begin_ns) for program in programs}
        self.place = {program.rank: 0 for program in programs}
        self.entered = {program.rank: -1 for program in programs}
        self.runnable = deque(self.place)
        self.lonely = 0
        self.last_end_ns = 0.0

    def run(self) -> Run:
        while True:
            while self.runnable:
                self._go_on(self.runnable.popleft())
            stuck = [number for number, state in self.states.items() if state.end_ns is None and state.waiting]
            if not stuck:
                break
            # Somebody's record of it is missing: the first that anybody waits for goes on with those who are there.
            number = min(stuck, key=lambda number: max(self.states[number].called.values(), default=0.0))
            self.lonely += 1
            self._end(number, max(self.states[number].called.values(), default=0.0))
        return Run(max([self.last_end_ns, *self.clock_ns.values()]), self.lonely)

    def _go_on(self, rank: int) -> None:
        steps = self.programs[rank].steps
        while self.place[rank] < len(steps):
            if not self._step(rank, steps[self.place[rank]]):
                return
            self.place[rank] += 1

    def _step(self, rank: int, step: Step) -> bool:
        """Return whether the rank got through it."""
        number = id(step.exchange)
        state = self.states[number]
        self.exchanges[number] = step.exchange
        if self.entered[rank] != self.place[rank]:
            self.entered[rank] = self.place[rank]
            self.clock_ns[rank] += step.gap_ns
            if step.kind != "wait":
                self._call(rank, number, state)
        if step.kind == "start":
            self.clock_ns[rank] += step.own_ns
            return True
        end_ns = self._end_for(rank, state)
        if end_ns is None:
            state.waiting.append(rank)
            return False
        self.clock_ns[rank] = max(self.clock_ns[rank], end_ns) + (step.own_ns if step.kind == "wait" else 0)
        return True

    def _end_for(self, rank: int, state: _State) -> float | None:
        return None if state.end_ns is None else max(state.end_ns, state.called.get(rank, state.end_ns))

    def _call(self, rank: int, number: int, state: _State) -> None:
        exchange = self.exchanges[number]
        state.called[rank] = self.clock_ns[rank]
        if state.end_ns is not None:
            return
        if exchange.sender in exchange.ranks:
            # A message is on its way as soon as it is sent, whether or not somebody receives it yet.
            if rank == exchange.sender:
                self._end(number, self.clock_ns[rank])
        elif len(state.called) >= len(exchange.ranks):
            self._end(number, max(state.called.values()))

    def _end(self, number: int, ready_ns: float) -> None:
        exchange, state = self.exchanges[number], self.states[number]
        end_ns = max(ready_ns, self.free_ns[exchange.queue]) + self.durations_ns[number]
        self.free_ns[exchange.queue] = state.end_ns = end_ns
        self.last_end_ns = max(self.last_end_ns, end_ns)
        self.runnable.extend(state.waiting)
        state.waiting.clear()


def simulate(programs: Sequence[Program], durations_ns: Mapping[int, float]) -> Run:
    """Run ``programs`` with these times of exchanges, by ``id()`` of the exchange.

    A collective begins when all of its ranks have called it and the one before it in its group is over; a message when
    it is sent, after those sent before it. A rank goes on after a synchronous call, or a wait, when the exchange is
    over; what it computes in between takes as long as recorded.
    """
    return _Simulation(programs, durations_ns).run()
