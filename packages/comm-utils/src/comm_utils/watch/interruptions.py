"""Ctrl-C and SIGTERM end a call or the process while the main thread cannot run Python's handlers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence

from comm_utils.flight_recorder.calls import Call
from comm_utils.watch.signals import acts_on, end_by, has_reported, has_terminated

__all__ = ["SECONDS_SHOWN", "Interruptions"]

#: Calls that have taken so long are reported when a signal comes.
SECONDS_SHOWN = 0.5
# How long Python's own handler of a signal may take to run.
_HANDLER_S = 0.3


class Interruptions:
    """Reports the calls under way when a signal comes, and does what Python's own handler would do.

    Args:
        waiting: returns the calls under way that somebody waits for.
        report: ``report(call, age_s, name)`` logs what the ranks do about a call.
        interrupt: ends a call that SIGINT has interrupted.
        is_urgent: whether a call that has just begun is worth a report as well.
        place: returns where the main thread is.
        of_main_thread: returns the calls, of some, that the main thread may have made.
    """

    def __init__(
        self,
        waiting: Callable[[], list[Call]],
        report: Callable[[Call, float, str], None],
        interrupt: Callable[[Call], None],
        is_urgent: Callable[[Call], bool] = lambda call: False,
        place: Callable[[], object] = lambda: None,
        of_main_thread: Callable[[Sequence[Call]], Sequence[Call]] = lambda calls: calls,
    ) -> None:
        self._place, self._of_main_thread = place, of_main_thread
        self._waiting, self._report, self._interrupt, self._is_urgent = waiting, report, interrupt, is_urgent

    def came(self, number: signal.Signals, stop: threading.Event) -> None:
        """Act on a signal that has come; where the program has a handler of its own, report the calls alone.

        Args:
            stop: is set when the watch ends.
        """
        acts, place = acts_on(number), self._place()
        waiting = self._waiting()
        try:
            for call in waiting:
                age_s = (time.perf_counter_ns() - call.begin_ns) / 1e9
                if age_s >= SECONDS_SHOWN or self._is_urgent(call):
                    self._report(call, age_s, number.name)
        finally:
            if number is signal.SIGTERM:  # after an earlier Ctrl-C, its handler still waits for the report
                has_reported()
            if acts and not stop.wait(_HANDLER_S) and acts_on(number):
                self._act(number, waiting, has_moved=self._place() != place)

    def _act(self, number: signal.Signals, waiting: list[Call], has_moved: bool) -> None:
        if number is signal.SIGTERM:
            # Whatever the main thread waits in: without the handler, the signal would have ended the process at once.
            if not has_terminated():
                end_by(number)
            return
        still = {(call.lane, call.number) for call in self._waiting()}
        here = [call for call in waiting if (call.lane, call.number) in still]
        groups = set()
        for call in self._of_main_thread(here):
            # Where the host has gone on, Python's own handler runs, unless it waits for the device.
            if call.is_on_device and has_moved:
                continue
            if call.group.name not in groups:
                groups.add(call.group.name)
                self._interrupt(call)
