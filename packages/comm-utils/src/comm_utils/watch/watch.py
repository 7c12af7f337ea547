"""A thread that watches the calls of this rank and of its peers: the one object :data:`WATCH`.

Four times a second it looks into the rings of the ranks of this host, and ten times while a call waits. Where there are
other hosts, a second thread looks into the store (:mod:`~comm_utils.watch.remote_observer`). The watch

- finds ranks that have ended while this rank waits for them, and calls that differ between ranks;
- tells the other ranks, and the backend (:meth:`Watch.when_in_trouble`), which ends calls that wait in vain;
- warns once of a call that takes long, and says who is missing and what they do instead;
- keeps the Python stacks in this rank's ring current while it makes no progress.

A call that fails asks :meth:`Watch.explain` for the cause.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from comm_utils import threads
from comm_utils.errors import (
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommTimeoutError,
    PeerLostError,
)
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.reader import RingError, RingReader
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.host_identity import host_name
from comm_utils.log import logger
from comm_utils.process_state import GONE
from comm_utils.rank_processes import PROCESSES, named_ranks
from comm_utils.watch.absence import describe_absent, describe_missing, find_unfinished
from comm_utils.watch.call_comparison import CallComparison
from comm_utils.watch.causes import find_cause
from comm_utils.watch.comparison import marks_by_group
from comm_utils.watch.explanation import for_others
from comm_utils.watch.interruptions import Interruptions
from comm_utils.watch.mailbox import Mailbox
from comm_utils.watch.message_comparison import MessageComparison
from comm_utils.watch.open_calls import OpenCalls
from comm_utils.watch.remote_observer import RemoteObserver
from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.signals import SignalPipe
from comm_utils.watch.stacks import StackInRing, calls_of_main_thread, main_thread_place
from comm_utils.watch.steps import Steps
from comm_utils.watch.trouble import Trouble, error_class
from comm_utils.watch.unraised import UnraisedMismatches
from comm_utils.watch.waiting_calls import Left, WaitingCalls, warn_of_wait
from comm_utils.watch.world_view import WorldView

__all__ = ["WATCH", "Watch"]

# Seconds between two looks: while a call has waited for so long, and otherwise.
_EVERY_S, _CALM_EVERY_S = 0.1, 0.25
_WAITS_NS = 50_000_000
# Ranks of this host find each other in the first looks, also where one of them ends at once.
_FIRST_LOOKS_S = 0.002, 0.005, 0.01, 0.02, 0.04, 0.08
# How long a rank that ends its world keeps its ring for others that have not opened it.
_SEEN_S = 0.3
# Time to tell ranks of other hosts.
_TELL_S = 0.05
# Groups in which another rank gave up: of so many this rank remembers it until it comes to them.
_MOST_GIVEN_UP = 1024
# Of so many of this rank's latest calls, others learn which was its last one on a group that it leaves.
_LATEST = 512
#: Called with the name of a group and the trouble that it is in.
Listener = Callable[[str, Trouble], None]


class _Looks(NamedTuple):
    """The parts of a look at the calls."""

    open_calls: OpenCalls
    waiting: WaitingCalls
    comparison: CallComparison
    messages: MessageComparison


class Watch:
    """The watch of one process; see the module.

    Attributes:
        settings: what the next :meth:`start` does.
    """

    def __init__(self) -> None:
        self.settings = WatchSettings()
        self._listeners: list[Listener] = []
        self._before_looks: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._signals: SignalPipe | None = None
        self._troubles: dict[str, Trouble] = {}
        # Failures of other ranks that their library makes known; not oneCCL.
        self._failures_elsewhere: dict[str, Trouble] = {}
        # Of ranks of other hosts that were interrupted: they make no other call on the group.
        self._left: dict[str, Left] = {}
        # The first failure of another rank, by group, also of groups that this rank has not come to yet.
        self._given_up: dict[str, Trouble] = {}
        self._steps = Steps()
        self._view = WorldView(0, 1, None)
        # None where there is no ring. All of it refers to the store, whose server ends with the last reference.
        self._looks: _Looks | None = None
        self._observer: RemoteObserver | None = None
        self._is_waiting = False
        self._unraised = UnraisedMismatches()
        self._read_failures: dict[int, int] = {}
        self._stack = StackInRing()

    # --- start and end

    def start(self, rank: int, world_size: int, connect: Callable[[], Mailbox | None] = lambda: None) -> None:
        """Watch the ranks of a new world, whose ring :data:`RECORDER` has opened.

        Args:
            connect: opens the way to ranks of other hosts when it is needed; it is closed at the end.

        Raises:
            RuntimeError: there can be no thread.
        """
        self.stop()
        own: RingReader | None = None
        with suppress(RingError, ValueError):
            own = RingReader(RECORDER.memory.memory)
        if own is not None and not own.word("recorded"):
            own = None  # what other ranks may have called is not known either
        self._view = view = WorldView(rank, world_size, own, RECORDER.path, connect, RECORDER.closed_ns, PROCESSES)
        if own is None:
            return
        self._looks = _Looks(
            OpenCalls(own),
            WaitingCalls(view, self._troubles, self.settings, self._failures_elsewhere, self._left),
            CallComparison(view, own, self._troubles, self._unraised.raised),
            MessageComparison(view, own, self._troubles),
        )
        if self.settings.enabled and world_size > 1:
            self._signals = SignalPipe(self.settings.signals)
            self._thread = threading.Thread(
                target=self._run, args=(self._signals, self._stop), name="comm-watch", daemon=True
            )
            self._observer = RemoteObserver(view, self._signals.duplicate())
            try:
                self._observer.start(self.settings.compares, self._troubles, self._stop)
                threads.start(self._thread)
            except BaseException:
                self._thread = None
                self.stop()
                raise

    def stop(self) -> None:
        """End the watch of a world."""
        thread = self._thread
        own = self._view.own
        if thread is not None and own is not None and thread is not threading.current_thread():
            with suppress(Exception):  # the end goes on, whatever other processes have written
                self._view.local.refresh(now=True)
                self._view.local.await_listing(own.header.monotonic_ns, _SEEN_S)
        self._thread = None
        self._stop.set()
        self._view.remote.close()
        if self._signals is not None:
            self._signals.wake()
            # While Python is being finalized, the thread runs no more.
            if thread is not None and thread is not threading.current_thread() and not sys.is_finalizing():
                thread.join(timeout=2.0)
            self._signals.close()
        self._look_back()
        self._view.close()
        self._reset()

    def _look_back(self) -> None:
        """Compare the calls once more, as those just before the end have not been compared."""
        own = self._view.own
        if own is None or not self.settings.compares:
            return
        with suppress(Exception):  # the end goes on, whatever other processes have written
            self._view.local.refresh(now=True)
            own.refresh()
            self._compare(thoroughly=True)
            self._unraised.log_at_end(self._view.rank)

    def leave_to_parent(self) -> None:
        """Forget the parent's watch in a forked child, which does not have its thread."""
        if self._signals is not None:
            self._signals.leave_to_parent()
        self._reset()

    def before_exit(self) -> None:
        """Let no thread be inside the store when Python ends: there it would abort the process."""
        if self._signals is not None:
            self._signals.before_exit()
        self._view.remote.close()

    def when_in_trouble(self, listener: Listener) -> None:
        """Call ``listener(group, trouble)`` from the watch's thread when the ranks of a group cannot go on."""
        self._listeners.append(listener)

    def before_each_look(self, function: Callable[[], None]) -> None:
        """Call ``function()`` in the watch's thread, to bring the records of this rank up to date."""
        self._before_looks.append(function)

    def has_steps(self, group: str, steps: Sequence[str]) -> None:
        """Add to the other groups of this rank in which calls on ``group`` go in steps; none from its end on.

        A rank that gives up in ``group`` takes part in no further step. Others wait for that in groups that it may
        not belong to: calls in these groups end when this rank hears of it, or at once where it has heard of it before.
        """
        self._steps.add(group, steps)
        if not steps:
            self._given_up.pop(group, None)
            return
        # After they were added: the thread of the watch notes what it hears before it looks for them.
        trouble = self._troubles.get(group) or self._given_up.get(group)
        if trouble is not None:
            for step in steps:
                self._troubles.setdefault(step, trouble)

    def whole(self, group: str) -> str:
        """Return the group whose calls go in steps in ``group``; that itself where it was not made for steps."""
        return self._steps.whole(group)

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None

    # --- what callers ask

    def trouble(self, group: str) -> Trouble | None:
        """Return why the ranks of the group of that name cannot go on; None while they can."""
        return self._troubles.get(group)

    def failure_elsewhere(self, group: str) -> Trouble | None:
        """Return the failure of another rank, after which the group of that name has broken there; None before."""
        return self._failures_elsewhere.get(group)

    def explain(self, group: RingGroup, timed_out: bool) -> Trouble | None:
        """Look for the cause of a failed call, for about a second at most; None where nothing is found.

        Args:
            timed_out: it ran into its timeout; otherwise its connections were closed, and why may only now become
                visible, such as the end of a process.
        """
        if not group.ranks:  # its members are no ranks of this world
            return None
        try:
            return find_cause(self._view, self._troubles, self._failures_elsewhere, group, timed_out)
        except Exception as error:  # the failure itself is the one to report
            logger.warning("the cause of a failed call could not be looked for: %s: %s", type(error).__name__, error)
            return None

    def missing(self, group: RingGroup, asks: bool = True) -> str:
        """Return who keeps the calls of a group waiting, and what they do instead; "" where that is not known.

        Args:
            asks: ranks of other hosts, which takes up to a second.
        """
        return self._described(lambda: describe_missing(self._view, group, asks))

    def unfinished(self, groups: Sequence[RingGroup]) -> dict[str, str]:
        """Return, by the name of a group, the collective of this rank that other ranks keep from its end, and which.

        Ranks have up to a second to come.
        """
        if self._view.own is None:
            return {}
        try:
            return find_unfinished(self._view, groups)
        except Exception as error:  # the groups end all the same
            logger.warning("calls under way could not be looked for: %s: %s", type(error).__name__, error)
            return {}

    def recorded(self, number: int) -> Call | None:
        """Return the call of this rank that Python recorded under that number; None where the ring lacks it."""
        own = self._view.own
        if own is None:
            return None
        own.refresh()
        return own.call(0, number)

    def absent(self, ranks: Sequence[int], call: str) -> str:
        """Return what ``ranks``, which have not made ``call``, do instead; "" where that is not known."""
        return self._described(lambda: describe_absent(self._view, ranks, call))

    def _described(self, describe: Callable[[], str]) -> str:
        if not self.is_running:
            return ""
        try:
            return describe()
        except Exception as error:  # the failure itself is the one to report
            logger.warning("the missing ranks could not be looked for: %s: %s", type(error).__name__, error)
            return ""

    def tell(self, group: str, error: BaseException, trouble: Trouble | None) -> None:
        """Note in this rank's ring, and tell other hosts, that this rank raised ``error`` in a group.

        Args:
            trouble: the cause, where it is known; its kind is what the others raise, where that is a mismatch.
        """
        self._unraised.has_raised(group)
        is_mismatch = trouble is not None and trouble.kind is CollectiveMismatchError
        name = CollectiveMismatchError.__name__ if is_mismatch else type(error).__name__
        trouble = None if trouble is None else for_others(trouble)
        RECORDER.failure(group, name, "" if trouble is None else trouble.text, () if trouble is None else trouble.ranks)
        if self._thread is not None and self._view.has_unseen_ranks and trouble is not None:
            self._view.remote.tell_within(group, name, trouble.text, _TELL_S, self._last_begun(group))

    def _last_begun(self, group: str) -> int:
        """Return the number of this rank's last collective on a group; -1 where the latest records lack it."""
        own = self._view.own
        if own is None:
            return -1
        own.refresh()
        has_all = own.count() <= _LATEST
        return max(marks_by_group(own, _LATEST).get(group, ()), default=0 if has_all else -1)

    def tell_of_lack(self, group: str, call: str, error: BackendUnavailableError, lack: str) -> None:
        """Tell the others why this rank takes no part in a call, nor in any later one of the group: they wait for it.

        Args:
            error: what it raises.
            lack: what it has not enough of.
        """
        rank = self._view.rank
        where = f"pid {os.getpid()} on {host_name()}"
        self.tell(group, error, Trouble(CommTimeoutError, f"rank {rank} ({where}) gave up in {call}: {lack}", (rank,)))

    # --- the thread

    def _run(self, signals: SignalPipe, stop: threading.Event) -> None:
        view = self._view
        interruptions = Interruptions(
            self._waiting_calls,
            lambda call, age_s, name: warn_of_wait(view, call, age_s, f"{name} came while "),
            self._interrupt,
            lambda call: any(view.local.state_of(rank) in GONE for rank in call.group.ranks if rank != view.rank),
            main_thread_place,
            calls_of_main_thread,
        )
        has_warned, first = False, iter(_FIRST_LOOKS_S)
        while not stop.is_set():
            came = signals.wait(next(first, _EVERY_S if self._is_waiting else _CALM_EVERY_S))
            if stop.is_set():
                return
            try:
                for number in {*came} & {signal.SIGINT, signal.SIGTERM}:
                    interruptions.came(signal.Signals(number), stop)
                self._look()
            except Exception as error:
                if not stop.is_set() and not has_warned:
                    has_warned = True
                    logger.warning(
                        "the watch of rank %d could not look: %s: %s; what it misses fails at the timeout of the call",
                        view.rank,
                        type(error).__name__,
                        error,
                    )

    def _look(self) -> None:
        own = self._view.own
        if own is None:
            return
        RECORDER.memory.set_word("looked_at", time.perf_counter_ns())
        self._view.local.refresh()
        RECORDER.memory.set_word("listed_at", self._view.local.listed_ns)
        self._stack.update(own)
        waiting = self._waiting_calls()
        since_ns = time.perf_counter_ns() - _WAITS_NS
        self._is_waiting = any(call.begin_ns < since_ns for call in waiting)
        self._read_notes()
        if self.settings.compares:
            self._compare()
        if self._looks is not None:
            for group, trouble in self._looks.waiting.look(waiting):
                self.found(group, trouble)
        if self._observer is not None:
            for notice in self._observer.notices():
                self._heard(notice.group, notice.error, notice.text)
                if notice.error == BrokenGroupError.__name__ and notice.last >= 0:
                    left = Left(notice.last, Trouble(PeerLostError, notice.text))
                    self._left[notice.group] = min(left, self._left.get(notice.group, left), key=lambda one: one.last)
            for group, trouble in self._observer.found():
                self.found(group, trouble)
        self._unraised.log(self._view.rank, {call.group.name for call in waiting})

    def _waiting_calls(self) -> list[Call]:
        if self._view.own is None or self._looks is None:
            return []
        for function in self._before_looks:
            function()
        self._view.own.refresh()
        return self._looks.open_calls.look()

    def _compare(self, thoroughly: bool = False) -> None:
        if self._looks is None:
            return
        for group, trouble in self._looks.comparison.look(thoroughly):
            self.found(group, trouble)
        if self.settings.mismatch != "strict":  # in which each message comes with a description, which is compared
            for group, trouble in self._looks.messages.look(thoroughly):
                self.found(group, trouble)

    def _interrupt(self, call: Call) -> None:
        """End the calls of a group in which the main thread waits and cannot see SIGINT, or that it has left by it."""
        rank = self._view.rank
        trouble = Trouble(
            BrokenGroupError, f"{named_ranks([rank], PROCESSES)} was interrupted (SIGINT) in {call.name}", (rank,)
        )
        if call.is_on_device:  # no call of the program notes it
            self.tell(call.group.name, BrokenGroupError(trouble.text), trouble)
        self._announce(call.group.name, trouble)

    # --- trouble

    def _enter(self, group: str, trouble: Trouble) -> None:
        self._troubles[group] = trouble
        self._unraised.add(group, trouble)

    def found(self, group: str, trouble: Trouble) -> None:
        """Note trouble that this rank has found, and tell the others; called in the watch's thread."""
        if group in self._troubles:
            return
        self._enter(group, trouble)
        text = for_others(trouble).text
        RECORDER.failure(group, trouble.kind.__name__, text, trouble.ranks)
        if self._stop.is_set():
            return
        if self._view.has_unseen_ranks:
            self._view.remote.tell_within(group, trouble.kind.__name__, text, _TELL_S)
        self._announce(group, trouble)

    def _announce(self, group: str, trouble: Trouble) -> None:
        for listener in list(self._listeners):
            with suppress(Exception):
                listener(group, trouble)

    def _read_notes(self) -> None:
        """Hear of mismatches that another rank of this host has found."""
        for rank, reader in self._view.local.readers.items():
            reader.refresh()
            for index, failure in reader.failures_after(self._read_failures.get(rank, 0)):
                self._read_failures[rank] = index
                self._heard(failure.group, failure.error, failure.text, failure.ranks)

    def _heard(self, group: str, error: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Take over what another rank found, where it concerns a group of this rank."""
        kind = error_class(error)
        own = self._view.own
        if kind is None or own is None:
            return
        trouble = Trouble(kind, text, ranks)
        self._given_up.setdefault(group, trouble)
        if len(self._given_up) > _MOST_GIVEN_UP:
            self._given_up.pop(next(iter(self._given_up)), None)
        for step in self._steps.below(group):
            if step not in self._troubles:
                self._troubles[step] = trouble
                self._announce(step, trouble)
        if group in self._troubles:
            return
        own.refresh()
        if not any(one.name == group for one in list(own.groups.values())):  # another thread may read new ones
            return
        if kind is CollectiveMismatchError:
            self._enter(group, trouble)
            self._announce(group, trouble)
        elif issubclass(kind, (BrokenGroupError, CommTimeoutError, PeerLostError)):
            earlier = Trouble(kind, f"another rank gave up earlier: {text}", ranks)
            self._failures_elsewhere.setdefault(group, earlier)


#: The watch of this process.
WATCH = Watch()
atexit.register(WATCH.before_exit)
os.register_at_fork(after_in_child=WATCH.leave_to_parent)
