"""A check of schedules by simulation: no rank waits forever, sends and receives match, inputs are there in time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from comm_collectives.hooks.pipeline.actions import BACKWARD, FORWARD, Compute, Exchange, Message, Schedule
from comm_collectives.hooks.pipeline.place_messages import needs
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["ScheduleReport", "check_schedule"]


@dataclass(frozen=True)
class ScheduleReport:
    """The result of a simulation.

    Attributes:
        peak_activations: for each rank, the most micro-batches (times stages) whose activations it kept at once.
        messages: number of messages between ranks.
        length: time of the longest rank, where a forward pass takes 1 and a backward pass 2.
        idle_fraction: part of that time in which the ranks, on average, wait.
    """

    peak_activations: tuple[int, ...]
    messages: int
    length: int
    idle_fraction: float


def check_schedule(schedule: Schedule) -> ScheduleReport:
    """Simulate ``schedule`` with sends that wait for their receiver, and return what was counted.

    A rank stays in an exchange until each of its messages has met its counterpart: the strictest that a library may do.

    Args:
        schedule: from one of the functions that make them, or written by hand.

    Raises:
        ArgumentError: ranks wait for one another forever, a message is not sent, not received, or received in another
            order than sent, or a pass runs before its input is there or on another rank; names the ranks.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentTypeError(f"check_schedule: schedule: got {shown(schedule)}; expected a Schedule")
    if len(schedule.actions) != schedule.ranks:
        raise ArgumentError(
            f"check_schedule: {schedule.name!r} has actions for {len(schedule.actions)} ranks; expected "
            f"{schedule.ranks}"
        )
    _check_counterparts(schedule)
    simulation = _Simulation(schedule)
    while simulation.step():
        pass
    return simulation.report()


def _refused(schedule: Schedule, text: str) -> ArgumentError:
    return ArgumentError(f"check_schedule: {schedule.name!r}: {text}")


def _check_counterparts(schedule: Schedule) -> None:
    """Check that each message is sent once and received once, and in one order between two ranks."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            for message in action.messages if isinstance(action, Exchange) else ():
                if rank not in (message.src, message.dst) or message.src == message.dst:
                    raise _refused(schedule, f"rank {rank} takes part in {message}; expected its own messages alone")
                target = sent if rank == message.src else received
                target.setdefault((message.src, message.dst), []).append(message)
    for pair in sorted({*sent, *received}):
        ours, theirs = sent.get(pair, []), received.get(pair, [])
        for one in (Counter(ours) - Counter(theirs)).elements():
            raise _refused(schedule, f"rank {pair[0]} sends {one}, which rank {pair[1]} does not receive")
        for one in (Counter(theirs) - Counter(ours)).elements():
            raise _refused(schedule, f"rank {pair[1]} receives {one}, which rank {pair[0]} does not send")
        for first, second in zip(ours, theirs, strict=True):
            if first != second:
                raise _refused(
                    schedule, f"rank {pair[0]} sends {first} where rank {pair[1]} receives {second}; expected one order"
                )


class _Simulation:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.place = [0] * schedule.ranks
        self.clock = [0] * schedule.ranks
        self.busy = 0
        self.there: list[dict[Compute, int]] = [{} for _ in range(schedule.ranks)]
        self.kept = [0] * schedule.ranks
        self.peak = [0] * schedule.ranks
        self.messages = 0
        # Messages of an exchange that a rank has come to and that are not complete.
        self.open: list[set[Message]] = [set() for _ in range(schedule.ranks)]
        self.entered = [False] * schedule.ranks

    def step(self) -> bool:
        """Let every rank go on as far as it can; return whether there is more to do."""
        has_moved = False
        for rank in range(self.schedule.ranks):
            while self._advance(rank):
                has_moved = True
        unfinished = [rank for rank, actions in enumerate(self.schedule.actions) if self.place[rank] < len(actions)]
        if unfinished and not has_moved:
            waits = [f"rank {rank} waits in {' and '.join(sorted(map(str, self.open[rank])))}" for rank in unfinished]
            raise _refused(self.schedule, f"no rank can go on: {'; '.join(waits)}")
        return bool(unfinished)

    def _advance(self, rank: int) -> bool:
        actions = self.schedule.actions[rank]
        if self.place[rank] >= len(actions):
            return False
        action = actions[self.place[rank]]
        if isinstance(action, Compute):
            self._compute(rank, action)
            self.place[rank] += 1
            return True
        has_moved = not self.entered[rank]
        if not self.entered[rank]:
            self.entered[rank], self.open[rank] = True, set(action.messages)
            for message in action.messages:
                if (
                    message.src == rank
                    and Compute(message.kind, message.stage, message.microbatch) not in self.there[rank]
                ):
                    raise _refused(self.schedule, f"rank {rank} sends {message} before it has computed them")
        for message in sorted(self.open[rank], key=str):
            other = message.dst if rank == message.src else message.src
            if message in self.open[other]:
                self.open[rank].remove(message)
                self.open[other].remove(message)
                produced = Compute(message.kind, message.stage, message.microbatch)
                self.there[message.dst][produced] = self.there[message.src][produced]
                self.messages += 1
                has_moved = True
        if not self.open[rank]:
            self.entered[rank] = False
            self.place[rank] += 1
            return True
        return has_moved

    def _compute(self, rank: int, one: Compute) -> None:
        if self.schedule.rank_of(one.stage) != rank:
            expected = self.schedule.rank_of(one.stage)
            raise _refused(self.schedule, f"rank {rank} has the {one}; expected it on rank {expected}")
        there = self.there[rank]
        if one in there:
            raise _refused(self.schedule, f"rank {rank} has the {one} twice; expected it once")
        begin = self.clock[rank]
        for needed in needs(one, self.schedule.stages):
            if needed not in there:
                raise _refused(self.schedule, f"rank {rank} has the {one} before the {needed} has come")
            begin = max(begin, there[needed])
        takes = 1 if one.kind == FORWARD else 2
        self.busy += takes
        self.clock[rank] = there[one] = begin + takes
        if self.schedule.has_backward:
            self.kept[rank] += 1 if one.kind == FORWARD else -1
            self.peak[rank] = max(self.peak[rank], self.kept[rank])

    def report(self) -> ScheduleReport:
        expected = (FORWARD, BACKWARD) if self.schedule.has_backward else (FORWARD,)
        for stage in range(self.schedule.stages):
            rank = self.schedule.rank_of(stage)
            for kind in expected:
                for number in range(self.schedule.microbatches):
                    if Compute(kind, stage, number) not in self.there[rank]:
                        raise _refused(self.schedule, f"rank {rank} has no {Compute(kind, stage, number)}")
        length = max(self.clock, default=0)
        idle = 1 - self.busy / (length * self.schedule.ranks) if length else 0.0
        return ScheduleReport(tuple(self.peak), self.messages, length, idle)
