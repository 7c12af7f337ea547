"""Makes one rank's calls in the order in which they were recorded."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.devices import devices_of
from comm_orchestrator.tools.local_ranks import FAILED
from comm_orchestrator.tools.trace.replay_calls import Calls
from comm_orchestrator.tools.trace.replay_plan import WORLD
from comm_utils.observability.traces import Event, RankTrace

__all__ = ["Player", "Step", "steps"]

# A wait ends late by about as much: the rest of a gap is spent awake.
_SLEEP_LATE_NS = 200_000
# How often a handle that nobody waits for is looked at.
_UNWATCHED = 64


class Step:
    """A call, or a wait for one.

    Attributes:
        event: index of the call's event.
        waits: it is a wait.
        gap_ns: what lay between the step before it and this one.
    """

    __slots__ = ("event", "gap_ns", "waits")

    def __init__(self, event: int, waits: bool, gap_ns: int) -> None:
        self.event, self.waits, self.gap_ns = event, waits, gap_ns


def steps(events: Sequence[Event], begin_ns: int) -> list[Step]:
    """Return a rank's calls, in order.

    Args:
        begin_ns: when the first rank began.
    """
    times: list[tuple[int, int, int, bool]] = []
    for number, event in enumerate(events):
        asynchronous = event.operation.asynchronous
        times.append((event.begin_ns, event.returned_ns if asynchronous else event.end_ns, number, False))
        if asynchronous and event.waits:
            # Later ones find it complete.
            times.append((event.waits[0].begin_ns, event.waits[0].end_ns, number, True))
    times.sort(key=lambda one: (one[0], one[3], one[2]))
    found = []
    until = begin_ns
    for begin, end, number, waits in times:
        found.append(Step(number, waits, max(begin - until, 0)))
        until = max(until, end)
    return found


class Player:
    """Replays the part of one rank.

    Args:
        timeout_s: a call or wait that takes longer ends the process.
    """

    def __init__(self, trace: RankTrace, begin_ns: int, keep_gaps: bool, timeout_s: float) -> None:
        self._events = trace.events
        self._steps = steps(trace.events, begin_ns)
        self._keep_gaps = keep_gaps
        self._timeout_s = timeout_s
        self._rank = trace.rank
        self._busy: tuple[int, str] | None = None  # since when, in what
        self._calls = Calls(trace.rank, _groups(trace), devices_of(facade.get_backend()))
        self._calls.prepare(sorted({event.operation for event in trace.events}, key=repr))

    def play(self) -> None:
        """Play all of it; called by all ranks.

        Raises:
            CommError: a call failed.
        """
        events, calls = self._events, self._calls
        pending: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        unwatched: list[int] = []
        with self._watched():
            for step in self._steps:
                if self._keep_gaps and step.gap_ns:
                    self._busy = None
                    _idle(step.gap_ns)
                event = events[step.event]
                operation = event.operation
                self._busy = perf_counter_ns(), operation.operation
                if step.waits:
                    self._wait(pending.pop(step.event))
                elif not operation.asynchronous:
                    calls.run(operation)
                else:
                    pending[step.event] = calls.issue(operation)
                    if not event.waits:
                        unwatched.append(step.event)
                        if len(unwatched) >= _UNWATCHED:
                            unwatched = self._reclaim(pending, unwatched)
            for one in list(pending.values()):
                self._busy = perf_counter_ns(), "the operations that nobody waited for"
                self._wait(one)
            self._busy = None

    def _wait(self, issued: tuple[Any, list[torch.Tensor]]) -> None:
        work, buffers = issued
        if work is not None:
            work.wait()
        self._calls.give_back(buffers)

    def _reclaim(self, pending: dict[int, tuple[Any, list[torch.Tensor]]], unwatched: list[int]) -> list[int]:
        """Take the buffers back of operations that are complete though nobody waited for them."""
        rest = []
        for number in unwatched:
            work, _ = pending[number]
            if work is None or work.is_completed():
                self._wait(pending.pop(number))
            else:
                rest.append(number)
        return rest

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the process where a library hangs beyond its own timeout: it cannot be interrupted."""
        done = threading.Event()
        limit_s = 1.5 * self._timeout_s + 5

        def watch() -> None:
            while not done.wait(min(1.0, limit_s / 10)):
                busy = self._busy
                if busy is not None and (perf_counter_ns() - busy[0]) * 1e-9 > limit_s:
                    text = f"error: rank {self._rank}: {busy[1]} has not come back within {limit_s:g} s"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(FAILED)

        thread = threading.Thread(target=watch, name="comm-replay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _groups(trace: RankTrace) -> dict[str, Any]:
    """Return the groups that this rank is in, made in an order that is the same on all ranks."""
    wanted = {(event.operation.group, event.operation.ranks) for event in trace.events}
    return {
        name: facade.new_group(list(ranks), sort_ranks=list(ranks) == sorted(ranks))
        for name, ranks in sorted(wanted)
        if name != WORLD
    }


def _idle(duration_ns: int) -> None:
    until = perf_counter_ns() + duration_ns
    if duration_ns > 2 * _SLEEP_LATE_NS:
        time.sleep((duration_ns - _SLEEP_LATE_NS) * 1e-9)
    while perf_counter_ns() < until:
        pass
