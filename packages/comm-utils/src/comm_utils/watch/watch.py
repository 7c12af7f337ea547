"""A thread that watches the calls of this rank and of its peers: the one object :data:`WATCH`.

Four times a second it looks into the rings of the ranks of this host, and ten times while a call waits. Where there are
other hosts, a second thread looks into the store (:mod:`~comm_utils.watch.remote_observer`). The watch

- finds ranks that have ended while this rank waits for them, and calls that differ between ranks;
- tells the other ranks, and the backend (:meth:`Watch.when_in_trouble`), which ends calls that wait in vain;
- warns once of a call that takes long, and says who is missing and what they do instead;
- keeps the Python stack in this rank's ring current while it makes no progress.

A call that fails asks :meth:`Watch.explain` for the cause.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommTimeoutError
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import (
    IN_DIFFERENT_ORDERS,
    FindingKind,
    diagnose_group,
    mismatches_of,
)
from comm_utils.flight_recorder.matching import rank_list
from comm_utils.flight_recorder.reader import RingError, RingReader
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.log import logger
from comm_utils.watch.comparison import disagreement, mismatch, neighbours
from comm_utils.watch.explanation import (
    addressed,
    age_of_failed_call,
    cause_of_others,
    combined,
    for_others,
    is_complete,
)
from comm_utils.watch.interruptions import Interruptions
from comm_utils.watch.local_ranks import LocalRanks
from comm_utils.watch.mailbox import Mailbox
from comm_utils.watch.open_calls import OpenCalls
from comm_utils.watch.remote_observer import RemoteObserver
from comm_utils.watch.remote_ranks import RemoteRanks
from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.signals import SignalPipe
from comm_utils.watch.stacks import main_thread_frame, stack_text
from comm_utils.watch.trouble import Trouble, error_class

__all__ = ["WATCH", "Watch"]

# Seconds between two looks: while a call has waited for so long, and otherwise.
_EVERY_S, _CALM_EVERY_S = 0.1, 0.25
_WAITS_NS = 50_000_000
# Split sizes are compared so often, of so many calls.
_PARTS_EVERY_S, _RECENT_PARTS = 0.5, 32
# Two ranks that wait for each other in different groups are found so late, and again later.
_FIRST_LOOK_S, _NEXT_LOOK_S = 0.4, 0.2
# After the first of these groups has ended, the ranks may come to the other one so much later.
_SECOND_GROUP_S = 0.3
# A rank that makes no call for so long shows where it is.
_IDLE_S = 0.5
# What a rank sent before it ended may still be on its way.
_GRACE_S = 1.0
# How long a call that failed looks for the cause.
_LOOK_S = 0.9
_SHORT_LOOK_S = 0.2
_TELL_S = 0.05
_COMPLETE_S = 0.3
_ASK_S = 0.8
#: Called with the name of a group and the trouble that it is in.
Listener = Callable[[str, Trouble], None]


class Watch:
    """The watch of one process; see the module.

    Attributes:
        settings: what the next :meth:`start` does.
    """

    def __init__(self) -> None:
        self.settings = WatchSettings()
        self._listeners: list[Listener] = []
        self._reset()

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._signals: SignalPipe | None = None
        self._troubles: dict[str, Trouble] = {}
        self._rank = 0
        self._world_size = 1
        self._own: RingReader | None = None
        self._calls: OpenCalls
        self._is_waiting = False
        self._next_parts_at = 0.0
        self._local = LocalRanks(None, None, 1)
        self._remote = RemoteRanks(0, lambda: None, lambda: None)
        self._observer: RemoteObserver | None = None
        self._warned: set[tuple[int, int]] = set()
        self._looks: dict[tuple[int, int], float] = {}
        self._missed_at: dict[str, float] = {}
        self._seen = -1
        self._seen_at = 0.0
        self._place: object = None
        self._read_failures: dict[int, int] = {}
        self._compared: dict[int, int] = {}
        # How many groups and rings there were, and the ranks of this host that this one is compared with.
        self._next_to_this: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    # --- start and end

    def start(self, rank: int, world_size: int, connect: Callable[[], Mailbox | None] = lambda: None) -> None:
        """Watch the ranks of a new world, whose ring :data:`RECORDER` has opened.

        Args:
            connect: opens the way to ranks of other hosts when it is needed; it is closed at the end.
        """
        self.stop()
        self._rank, self._world_size = rank, world_size
        with suppress(RingError, ValueError):
            self._own = RingReader(RECORDER.memory.memory)
            self._calls = OpenCalls(self._own)
        folder = None if RECORDER.path is None else RECORDER.path.parent
        self._local = LocalRanks(folder, RECORDER.path, world_size)
        self._remote = RemoteRanks(rank, connect, self._own_snapshot)
        if self.settings.enabled and self._own is not None and world_size > 1:
            self._signals = SignalPipe(self.settings.signals)
            self._thread = threading.Thread(
                target=self._run, args=(self._signals, self._stop), name="comm-watch", daemon=True
            )
            self._observer = RemoteObserver(
                rank, world_size, self._remote, self._local, self._snapshots, self._signals.duplicate()
            )
            self._observer.start(self.settings.compares, self._troubles, self._stop)
            self._thread.start()

    def stop(self) -> None:
        """End the watch of a world."""
        thread, self._thread = self._thread, None
        self._stop.set()
        self._remote.close()
        if self._signals is not None:
            self._signals.wake()
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=2.0)
            self._signals.close()
        self._look_back()
        self._local.close()
        self._reset()

    def _look_back(self) -> None:
        """Compare the calls once more, as those just before the end have not been compared."""
        own = self._own
        if own is None or not self.settings.compares:
            return
        with suppress(Exception):  # the end goes on, whatever other processes have written
            self._local.refresh(now=True)
            own.refresh()
            self._compare(own)

    def leave_to_parent(self) -> None:
        """Forget the parent's watch in a forked child, which does not have its thread."""
        if self._signals is not None:
            self._signals.leave_to_parent()
        self._reset()

    def before_exit(self) -> None:
        """Let no thread be inside the store when Python ends: there it would abort the process."""
        self._remote.close()

    def when_in_trouble(self, listener: Listener) -> None:
        """Call ``listener(group, trouble)`` from the watch's thread when the ranks of a group cannot go on."""
        self._listeners.append(listener)

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None

    # --- what callers ask

    def trouble(self, group: str) -> Trouble | None:
        """Return why the ranks of the group of that name cannot go on; None while they can."""
        return self._troubles.get(group)

    def explain(self, group: RingGroup, timed_out: bool) -> Trouble | None:
        """Look for the cause of a failed call, for about a second at most; None where nothing is found.

        Args:
            timed_out: it ran into its timeout; otherwise its connections were closed, and why may only now become
                visible, such as the end of a process.
        """
        was_known = group.name in self._troubles
        found = self._look_for_cause(group, timed_out)
        if found is None:
            return None
        if timed_out and not was_known and IN_DIFFERENT_ORDERS in found.text:
            # The timeout is shorter than the watch takes to find that.
            found = Trouble(CommTimeoutError, found.text, found.ranks)
        return addressed(self._rank, found)

    def _look_for_cause(self, group: RingGroup, timed_out: bool) -> Trouble | None:
        begin = time.monotonic()
        end = begin + _LOOK_S
        asked: dict[int, RankSnapshot] = {}
        weak: Trouble | None = None
        while self._own is not None:
            known = {**asked, **self._snapshots()}
            findings = diagnose_group(known, group)
            found = self._troubles.get(group.name)
            first = findings[0].kind if findings else None
            if found is None and first is FindingKind.MISMATCH:
                # The others may be about to make the same call: then all of them are named.
                if time.monotonic() < begin + _COMPLETE_S and not is_complete(findings[0], known):
                    time.sleep(0.01)
                    continue
                found = combined(self._rank, findings, known)
            if found is None:  # a rank that gave up may have left since, which is an effect
                age_ns = age_of_failed_call(known.get(self._rank), group, time.perf_counter_ns())
                found = cause_of_others(self._rank, group, known, first is FindingKind.LOST, age_ns)
            if found is None and first is FindingKind.LOST:
                found = combined(self._rank, findings, known)
            if found is not None:
                return found
            if findings:
                weak = combined(self._rank, findings, known)
                if timed_out and time.monotonic() - begin >= _SHORT_LOOK_S:
                    break
            unseen = [rank for rank in group.ranks if rank not in known]
            if unseen and not asked:
                limit_s = min(_ASK_S, max(0.1, end - time.monotonic()))
                asked = self._remote.ask_within(unseen, limit_s, lambda: group.name in self._troubles)
                if asked or group.name in self._troubles:
                    continue
            if time.monotonic() >= end:
                break
            time.sleep(0.02)
        return weak

    def tell(self, group: str, error: BaseException, trouble: Trouble | None) -> None:
        """Note in this rank's ring, and tell other hosts, that this rank raised ``error`` in a group.

        Args:
            trouble: the cause, where it is known.
        """
        name = type(error).__name__
        trouble = None if trouble is None else for_others(trouble)
        RECORDER.failure(group, name, "" if trouble is None else trouble.text, () if trouble is None else trouble.ranks)
        if self._thread is not None and len(self._local.readers) < self._world_size - 1 and trouble is not None:
            self._remote.tell_within(group, name, trouble.text, _TELL_S)

    # --- the thread

    def _run(self, signals: SignalPipe, stop: threading.Event) -> None:
        interruptions = Interruptions(
            self._waiting,
            lambda call, age_s, name: self._warn(call, age_s, f"{name} came while "),
            self._interrupt,
            lambda call: any(self._local.state_of(rank) == "ended" for rank in call.group.ranks if rank != self._rank),
        )
        has_warned = False
        while not stop.is_set():
            came = signals.wait(_EVERY_S if self._is_waiting else _CALM_EVERY_S)
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
                        self._rank,
                        type(error).__name__,
                        error,
                    )

    def _look(self) -> None:
        own = self._own
        if own is None:
            return
        RECORDER.memory.set_word("looked_at", time.perf_counter_ns())
        self._local.refresh()
        self._show_place(own)
        own.refresh()
        waiting = self._calls.look()
        since_ns = time.perf_counter_ns() - _WAITS_NS
        self._is_waiting = any(call.begin_ns < since_ns for call in waiting)
        if not waiting:
            self._missed_at.clear()
        self._read_notes()
        if self.settings.compares:
            self._compare(own)
        for call in waiting:
            self._look_at(call)
        if self._observer is not None:
            for group, error, text in self._observer.notices():
                self._heard(group, error, text)
            for group, trouble in self._observer.found():
                self._found(group, trouble)

    def _waiting(self) -> list[Call]:
        if self._own is None:
            return []
        self._own.refresh()
        return self._calls.look()

    def _interrupt(self, call: Call) -> None:
        """End the calls of a group in which the main thread waits and cannot see SIGINT."""
        trouble = Trouble(BrokenGroupError, f"rank {self._rank} was interrupted (SIGINT) in {call.name}")
        self._announce(call.group.name, trouble)

    def _own_snapshot(self) -> RankSnapshot | None:
        return None if self._own is None else take_snapshot(self._own)

    def _snapshots(self) -> dict[int, RankSnapshot]:
        self._local.refresh(now=True)
        found = self._local.snapshots()
        own = self._own_snapshot()
        if own is not None:
            found[self._rank] = own
        return found

    def _show_place(self, own: RingReader) -> None:
        """Write the Python stack into the ring where no call was begun for a while."""
        now, count = time.monotonic(), own.count(0) + own.count(1)
        if count != self._seen:
            self._seen, self._seen_at = count, now
        elif now - self._seen_at >= _IDLE_S:
            frame = main_thread_frame()
            place = None if frame is None else (id(frame), frame.f_lasti)
            if place != self._place:
                self._place = place
                RECORDER.memory.set_stack(stack_text(frame))

    # --- ranks that have ended, and calls that take long

    def _look_at(self, call: Call) -> None:
        age_s = (time.perf_counter_ns() - call.begin_ns) / 1e9
        group = call.group
        if age_s < 2 * _EVERY_S or not group.ranks:
            return
        others = [rank for rank in group.ranks if rank != self._rank and call.peer in (rank, -1)]
        ended = [rank for rank in others if self._local.state_of(rank) == "ended"]
        if call.is_message and len(ended) < len(others):
            ended = []  # one that lives may still send
        if ended and group.name not in self._troubles:
            self._missed(group, ended)
        if group.name not in self._troubles and self.settings.compares and age_s >= self._next_look_s(call):
            self._look_at_order(call, self._snapshots())
        warn_after_s = self.settings.warn_after_s
        if warn_after_s and age_s >= warn_after_s and (call.lane, call.number) not in self._warned:
            self._warned.add((call.lane, call.number))
            self._warn(call, age_s)

    def _look_at_order(self, call: Call, known: Mapping[int, RankSnapshot]) -> None:
        """Find out whether ranks wait for each other in two groups.

        One group ends first, the smaller one; the other does where the ranks do not come to it after that either.
        """
        group = call.group
        for finding in diagnose_group(known, group):
            if finding.kind is FindingKind.ORDER and finding.other_group is not None:
                # The same of the two on every rank, and not the world: its name comes before those of other groups.
                both = sorted((group, finding.other_group), key=lambda one: one.name, reverse=True)
                first = min(both, key=lambda one: len(one.ranks))
                self._found(first.name, Trouble.of(finding))
                return
        due_ns = time.perf_counter_ns() - int(_SECOND_GROUP_S * 1e9)
        for rank in group.ranks:
            one = known.get(rank)
            has_come = one is None or any(other.in_series >= call.in_series for other in one.collectives(group.name))
            if one is None or has_come or call.is_message or call.is_limited:
                continue
            for failure in one.failures:
                if IN_DIFFERENT_ORDERS in failure.text and call.begin_ns < failure.at_ns < due_ns:
                    self._found(group.name, Trouble(CollectiveMismatchError, failure.text, failure.ranks))
                    return

    def _next_look_s(self, call: Call) -> float:
        """Return the age at which a call that goes on is looked at again, the more seldom the older it is."""
        key = call.lane, call.number
        due_s = self._looks.get(key, _FIRST_LOOK_S)
        if (time.perf_counter_ns() - call.begin_ns) / 1e9 >= due_s:
            self._looks = {key: due_s + max(_NEXT_LOOK_S, due_s / 4)}
        return due_s

    def _missed(self, group: RingGroup, ended: Sequence[int]) -> None:
        """Note that a call waits for ranks that have ended."""
        findings = [one for one in diagnose_group(self._snapshots(), group) if one.kind <= FindingKind.MISSING]
        causes = [one for one in findings if set(one.ranks) & set(ended) or one.kind is FindingKind.MISMATCH]
        if not causes:
            self._missed_at.pop(group.name, None)
            return
        since = self._missed_at.setdefault(group.name, time.monotonic())
        if time.monotonic() - since >= _GRACE_S:
            self._found(group.name, Trouble.of(causes[0]))

    def _warn(self, call: Call, age_s: float, because: str = "") -> None:
        known = self._snapshots()
        unseen = [rank for rank in call.group.ranks if rank not in known]
        if unseen:
            known |= self._remote.ask_within(unseen, _ASK_S)
        findings = diagnose_group(known, call.group)
        texts, named = [], set[int]()
        for one in findings:
            if not named.issuperset(one.ranks):  # a rank that has ended is missing as well
                texts.append(one.text)
                named.update(one.ranks)
        said = "; ".join(texts) or "all ranks that can be seen from here are in this call"
        unseen = [rank for rank in call.group.ranks if rank not in known]
        if unseen:
            said += f"; {rank_list(unseen)}: not seen from here"
        logger.warning(
            "%s%s on %s has taken %.0f s so far%s: %s",
            because,
            call.name,
            call.group,
            age_s,
            f" ({call.caller})" if call.caller else "",
            said,
        )

    # --- calls that differ

    def _compare(self, own: RingReader) -> None:
        """Compare the calls of this rank with those of the next rank of this host in each group."""
        count = own.count(0)
        for rank, reader in self._neighbours():
            theirs = reader.count(0)
            if self._compared.get(rank) == count + theirs or not theirs:
                continue
            self._compared[rank] = count + theirs
            reader.refresh()
            for group, is_certain in disagreement(own, reader):
                if is_certain:
                    self._suspect(group, rank)
                elif time.monotonic() >= self._next_parts_at:
                    self._next_parts_at = time.monotonic() + _PARTS_EVERY_S
                    self._suspect(group)

    def _neighbours(self) -> list[tuple[int, RingReader]]:
        """Return the local ranks next to this one, so that all are compared with some other."""
        readers, groups = self._local.readers, self._own.groups if self._own else {}
        known = len(groups), len(readers)
        if self._next_to_this[0] != known:
            self._next_to_this = known, neighbours(self._rank, list(groups.values()), readers)
        return [(rank, readers[rank]) for rank in self._next_to_this[1] if rank in readers]

    def _suspect(self, name: str, other: int | None = None) -> None:
        """Find out in which call the ranks of a group differ, if they do.

        Args:
            other: a rank whose digests differ from this one's; None compares split sizes, of the latest calls.
        """
        own = self._own
        if name in self._troubles or own is None:
            return
        group = next((one for one in own.groups.values() if one.name == name), None)
        if group is None:
            return
        if other is not None:
            found = mismatch(group, {**self._local.readers, self._rank: own}, self._rank, other)
        else:
            known = {**self._local.snapshots(_RECENT_PARTS), self._rank: take_snapshot(own, recent=_RECENT_PARTS)}
            found = next(iter(mismatches_of(known, group)), None)
        if found is not None:
            self._found(name, Trouble.of(found))

    # --- trouble

    def _found(self, group: str, trouble: Trouble) -> None:
        """Note trouble that this rank has found, and tell the others."""
        if group in self._troubles:
            return
        self._troubles[group] = trouble
        RECORDER.failure(group, trouble.kind.__name__, trouble.text, trouble.ranks)
        if self._stop.is_set():
            logger.error(
                "rank %d ended its world after calls that differed, so their results may be wrong: %s",
                self._rank,
                trouble.text,
            )
            return
        if len(self._local.readers) < self._world_size - 1:
            self._remote.tell_within(group, trouble.kind.__name__, trouble.text, _TELL_S)
        self._announce(group, trouble)

    def _announce(self, group: str, trouble: Trouble) -> None:
        for listener in list(self._listeners):
            with suppress(Exception):
                listener(group, trouble)

    def _read_notes(self) -> None:
        """Hear of mismatches that another rank of this host has found."""
        for rank, reader in self._local.readers.items():
            reader.refresh()
            before = self._read_failures.get(rank, 0)
            for failure in reader.failures[before:]:
                self._heard(failure.group, failure.error, failure.text, failure.ranks)
            self._read_failures[rank] = len(reader.failures)

    def _heard(self, group: str, error: str, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Take over what another rank found, where it concerns a group of this rank."""
        kind = error_class(error)
        own = self._own
        if kind is None or own is None or group in self._troubles or kind is not CollectiveMismatchError:
            return
        own.refresh()
        if any(one.name == group for one in own.groups.values()):
            self._troubles[group] = Trouble(kind, text, ranks)
            self._announce(group, self._troubles[group])


#: The watch of this process.
WATCH = Watch()
atexit.register(WATCH.before_exit)
os.register_at_fork(after_in_child=WATCH.leave_to_parent)
