"""Turn a recorded job into a program for each rank, and simulate it with other times for its communication."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

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
    """A rank computes, then calls or waits.

    Attributes:
        kind: ``call``, ``start`` (asynchronous) or ``wait``.
        after: places of steps of this rank that ended before this one began, and for how long the rank computes between
            the two at least: that which ended last, and that of the same group, as threads have groups of their own.
            Steps of several threads may follow the same one. -1 is the first rank's first step.
        own_ns: what it takes the rank itself beside the transfer: to start it, or to finish it after the wait.
    """

    kind: str
    exchange: Exchange
    after: tuple[tuple[int, int], ...]
    own_ns: int = 0


@dataclass(frozen=True)
class Program:
    """The steps of one rank, in the order in which they began."""

    rank: int
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
    going_on: list[tuple[int, int]] = []  # ends and places of steps, the first to end first
    last_end, last = origin, -1
    last_of: dict[object, tuple[int, int]] = {}  # by group: its place, and how long no thread was in a step before
    computing, busy_until = 0, origin
    for place, (begin, end, kind, exchange, own) in enumerate(moments):
        while going_on and going_on[0][0] <= begin:
            last_end, last = heappop(going_on)
            last_of[group_of(moments[last][3].operation)] = last, computing
        computing += max(0, begin - busy_until)
        busy_until = max(busy_until, end)
        follows = [(last, begin - last_end)]
        of_group, computed = last_of.get(group_of(exchange.operation), (last, 0))
        if of_group != last:
            follows.append((of_group, computing - computed))
        steps.append(Step(kind, exchange, tuple(follows), max(0, own)))
        heappush(going_on, (max(begin, end), place))
    return Program(trace.rank, steps)


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
    waiting: list[tuple[int, int, float]] = field(default_factory=list)  # rank, place of its step, since when


class _Simulation:
    def __init__(self, programs: Sequence[Program], durations_ns: Mapping[int, float]) -> None:
        self.programs = {program.rank: program.steps for program in programs}
        self.durations_ns = durations_ns
        self.states: dict[int, _State] = defaultdict(_State)
        self.awaited: dict[int, _State] = {}  # those that some rank waits for
        self.free_ns: dict[object, float] = defaultdict(float)
        self.following: dict[tuple[int, int], list[int]] = defaultdict(list)
        for program in programs:
            for place, step in enumerate(program.steps):
                for after, _ in step.after:
                    self.following[program.rank, after].append(place)
        # Where each step ended; the last is that before the first.
        self.ends_ns: dict[int, list[float | None]] = {
            program.rank: [None] * (len(program.steps) + 1) for program in programs
        }
        self.runnable: deque[tuple[int, int, float]] = deque()  # rank, place, when it begins
        self.lonely = 0
        self.last_end_ns = 0.0

    def run(self) -> Run:
        for rank in self.programs:
            self._finish(rank, -1, 0.0)
        while True:
            while self.runnable:
                self._begin(*self.runnable.popleft())
            if not self.awaited:
                return Run(self.last_end_ns, self.lonely)
            # Somebody's record of it is missing: the first that anybody waits for goes on with those who are there.
            state = min(self.awaited.values(), key=lambda state: max(state.called.values(), default=0.0))
            self.lonely += 1
            rank, place, _ = state.waiting[0]
            self._end(self.programs[rank][place].exchange, state, max(state.called.values(), default=0.0))

    def _begin(self, rank: int, place: int, now_ns: float) -> None:
        step = self.programs[rank][place]
        state = self.states[id(step.exchange)]
        if step.kind != "wait":
            self._call(rank, step.exchange, state, now_ns)
        if step.kind == "start":
            self._finish(rank, place, now_ns + step.own_ns)
        elif state.end_ns is None:
            state.waiting.append((rank, place, now_ns))
            self.awaited[id(step.exchange)] = state
        else:
            self._go_on(rank, place, now_ns, state, state.end_ns)

    def _go_on(self, rank: int, place: int, since_ns: float, state: _State, end_ns: float) -> None:
        """Finish a call, or a wait, of an exchange that is over."""
        step = self.programs[rank][place]
        end_ns = max(since_ns, end_ns, state.called.get(rank, end_ns))
        self._finish(rank, place, end_ns + (step.own_ns if step.kind == "wait" else 0))

    def _finish(self, rank: int, place: int, end_ns: float) -> None:
        self.last_end_ns = max(self.last_end_ns, end_ns)
        ends_ns = self.ends_ns[rank]
        ends_ns[place] = end_ns
        for following in self.following.get((rank, place), ()):
            begin_ns = 0.0
            for after, gap_ns in self.programs[rank][following].after:
                after_ns = ends_ns[after]
                if after_ns is None:
                    break
                begin_ns = max(begin_ns, after_ns + gap_ns)
            else:
                self.runnable.append((rank, following, begin_ns))

    def _call(self, rank: int, exchange: Exchange, state: _State, now_ns: float) -> None:
        state.called[rank] = now_ns
        if state.end_ns is not None:
            return
        if exchange.sender in exchange.ranks:
            # A message is on its way as soon as it is sent, whether or not somebody receives it yet.
            if rank == exchange.sender:
                self._end(exchange, state, now_ns)
        elif len(state.called) >= len(exchange.ranks):
            self._end(exchange, state, max(state.called.values()))

    def _end(self, exchange: Exchange, state: _State, ready_ns: float) -> None:
        end_ns = max(ready_ns, self.free_ns[exchange.queue]) + self.durations_ns[id(exchange)]
        self.free_ns[exchange.queue] = state.end_ns = end_ns
        self.last_end_ns = max(self.last_end_ns, end_ns)
        waiting, state.waiting = state.waiting, []
        self.awaited.pop(id(exchange), None)
        for rank, place, since_ns in waiting:
            self._go_on(rank, place, since_ns, state, end_ns)


def simulate(programs: Sequence[Program], durations_ns: Mapping[int, float]) -> Run:
    """Run ``programs`` with these times of exchanges, by ``id()`` of the exchange.

    A collective begins when all of its ranks have called it and the one before it in its group is over; a message when
    it is sent, after those sent before it. A rank goes on after a synchronous call, or a wait, when the exchange is
    over; what it computes in between takes as long as recorded.
    """
    return _Simulation(programs, durations_ns).run()
