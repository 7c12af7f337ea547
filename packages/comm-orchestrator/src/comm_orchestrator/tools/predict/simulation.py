"""Goes through a recorded job with other times for its communication."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from comm_orchestrator.tools.predict.program import Exchange, Program, Step

__all__ = ["Run", "simulate"]


@dataclass(frozen=True)
class Run:
    """How it went.

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
        """Whether the rank got through it."""
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
