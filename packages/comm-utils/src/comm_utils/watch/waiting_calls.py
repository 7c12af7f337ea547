"""Looks at the calls in which this rank waits: for ranks that have gone or wait elsewhere, and too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from comm_utils.errors import CollectiveMismatchError, CommTimeoutError
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import IN_DIFFERENT_ORDERS, FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.flight_recorder.store_steps import numbers_agree
from comm_utils.log import logger
from comm_utils.process_state import GONE
from comm_utils.watch.absence import NOBODY, describe_missing
from comm_utils.watch.explanation import addressed, cause_of_others
from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.trouble import Trouble, error_class
from comm_utils.watch.world_view import WorldView

__all__ = ["Left", "WaitingCalls", "warn_of_wait"]

# The age at which a call is looked at.
_YOUNGEST_S = 0.2
# Ranks that wait for each other in different groups are found so late, and again later.
_FIRST_LOOK_S, _NEXT_LOOK_S = 0.4, 0.2
# After the first of these groups has ended, the ranks may come to the others so much later.
_SECOND_GROUP_S = 0.3
# What a rank sent before it ended may still be on its way.
_GRACE_S = 1.0
# Its library ends a call at its timeout, and looks for the cause for a second or two.
_LATE_S = 5.0
# No failure in another group is so young.
_OF_THIS_GROUP = -1
#: Takes them once a look.
_Snapshots: TypeAlias = Callable[[], Mapping[int, RankSnapshot]]


class Left(NamedTuple):
    """A rank that makes no more calls on a group.

    Attributes:
        last: the number of the last collective that it began there.
        trouble: the reason.
    """

    last: int
    trouble: Trouble


class WaitingCalls:
    """Finds out why calls of this rank do not go on.

    Args:
        broken: the groups that are in trouble already.
        failing: the groups in which another rank has raised.
        left: the groups in which a rank of another host makes no more calls.
    """

    def __init__(
        self,
        view: WorldView,
        broken: Container[str],
        settings: WatchSettings,
        failing: Container[str] = frozenset(),
        left: Mapping[str, Left] = MappingProxyType({}),
    ) -> None:
        self._view, self._broken, self._settings, self._failing, self._left = view, broken, settings, failing, left
        self._warned: set[tuple[int, int]] = set()
        self._looks: dict[tuple[int, int], float] = {}
        # When each call was first seen as one that somebody waits for.
        self._waited_ns: dict[tuple[int, int], int] = {}
        self._missed_at: dict[str, float] = {}

    def look(self, calls: Sequence[Call]) -> Iterator[tuple[str, Trouble]]:
        """Yield the groups that cannot go on; warn of calls that take long.

        Args:
            calls: all in which this rank waits.
        """
        if not calls:
            self._missed_at.clear()
        keys = {(call.lane, call.number) for call in calls}
        self._looks = {key: age_s for key, age_s in self._looks.items() if key in keys}
        now_ns = time.perf_counter_ns()
        self._waited_ns = {key: self._waited_ns.get(key, now_ns) for key in keys}
        snapshots = cache(self._view.snapshots)
        for call in calls:
            yield from self._look_at(call, snapshots)

    def _look_at(self, call: Call, snapshots: _Snapshots) -> Iterator[tuple[str, Trouble]]:
        age_s = (time.perf_counter_ns() - call.begin_ns) / 1e9
        group = call.group
        if age_s < _YOUNGEST_S or not group.ranks:
            return
        view = self._view
        others = [rank for rank in group.ranks if rank != view.rank and call.peer in (rank, -1)]
        ended = [rank for rank in others if view.local.state_of(rank) in {*GONE, "left"}]
        if call.is_message and len(ended) < len(others):
            ended = []  # one that lives may still send
        if ended and group.name not in self._broken:
            yield from self._missed(group, ended, snapshots)
        left = self._left.get(group.name)
        if left is not None and group.name not in self._broken and age_s >= _GRACE_S and _is_after(call, left.last):
            yield group.name, left.trouble
        if group.name not in self._broken and self._settings.compares and age_s >= self._next_look_s(call):
            yield from self._look_at_order(call, snapshots())
        if group.name not in self._broken and self._is_overdue(call):
            yield group.name, self._overdue(call)
            return
        warn_after_s = self._settings.warn_after_s
        if warn_after_s and age_s >= warn_after_s and (call.lane, call.number) not in self._warned:
            self._warned.add((call.lane, call.number))
            warn_of_wait(view, call, age_s)

    def _is_overdue(self, call: Call) -> bool:
        """Return whether nothing in a group has ended for longer than its timeout, by the monotonic clock.

        gloo waits by the time of day: where that is set back, its calls go on for as much longer.
        """
        own, due_ns = self._view.own, time.perf_counter_ns() - (call.group.timeout_s + _LATE_S) * 1e9
        if own is None or call.is_limited or call.is_on_device or self._timed_from_ns(call) > due_ns:
            return False
        # Calls that were begun before it may have had their own time.
        return all(one.end_ns <= due_ns for one in take_snapshot(own).calls if one.group.name == call.group.name)

    def _timed_from_ns(self, call: Call) -> int:
        """Return when the timeout of a call began: gloo's of a message does where the program waits for its handle."""
        return self._waited_ns[call.lane, call.number] if call.is_message else call.begin_ns

    def _overdue(self, call: Call) -> Trouble:
        age_s = (time.perf_counter_ns() - self._timed_from_ns(call)) / 1e9
        said = describe_missing(self._view, call.group) or NOBODY
        text = (
            f"{call.name} has taken {age_s:.0f} s, although the timeout of {call.group} is "
            f"{call.group.timeout_s:g} s; the system's clock may have been set back: {said}"
        )
        return Trouble(CommTimeoutError, text)

    def _look_at_order(self, call: Call, known: Mapping[int, RankSnapshot]) -> Iterator[tuple[str, Trouble]]:
        """Find out whether ranks wait for each other in several groups.

        One group ends first, the smallest one; the others do where the ranks do not come to it after that either.
        """
        group = call.group
        for rank in group.ranks:
            is_other = rank in known and rank != self._view.rank
            trouble = _has_given_up(known[rank], call) if is_other and not call.is_message else None
            if trouble is not None:
                yield group.name, addressed(self._view.rank, trouble)
                return
        for finding in diagnose_group(known, group):
            if finding.kind is FindingKind.ORDER:
                # The same of them on every rank, and not the world: its name comes before those of other groups.
                all_groups = sorted((group, *finding.other_groups), key=lambda one: one.name, reverse=True)
                first = min(all_groups, key=lambda one: len(one.ranks))
                yield first.name, Trouble.of(finding)
                return
        due_ns = time.perf_counter_ns() - int(_SECOND_GROUP_S * 1e9)
        for rank in group.ranks:
            one = known.get(rank)
            has_come = one is None or any(other.in_series >= call.in_series for other in one.collectives(group.name))
            if one is None or has_come or call.is_message or call.is_limited:
                continue
            for failure in one.failures:
                if IN_DIFFERENT_ORDERS in failure.text and call.begin_ns < failure.at_ns < due_ns:
                    yield group.name, Trouble(CollectiveMismatchError, failure.text, failure.ranks)
                    return

    def _next_look_s(self, call: Call) -> float:
        """Return the age at which a call that goes on is looked at again.

        The older it is, the more seldom it is, unless another rank has raised in its group.
        """
        key, age_s = (call.lane, call.number), (time.perf_counter_ns() - call.begin_ns) / 1e9
        looked_s = self._looks.get(key)
        due_s = _FIRST_LOOK_S
        if looked_s is not None:
            due_s = looked_s + max(_NEXT_LOOK_S, 0.0 if call.group.name in self._failing else looked_s / 4)
        if age_s >= due_s:
            self._looks[key] = age_s
        return due_s

    def _missed(self, group: RingGroup, ended: Sequence[int], snapshots: _Snapshots) -> Iterator[tuple[str, Trouble]]:
        """Find out whether a call waits for ranks that have gone, for longer than they may still be heard."""
        known = snapshots()
        findings = [one for one in diagnose_group(known, group) if one.kind <= FindingKind.MISSING]
        causes = [one for one in findings if set(one.ranks) & set(ended) or one.kind is FindingKind.MISMATCH]
        if not causes:
            self._missed_at.pop(group.name, None)
            return
        since = self._missed_at.setdefault(group.name, time.monotonic())
        if time.monotonic() - since >= _GRACE_S:
            # Who has ended may have followed a rank that is not seen from here.
            first = {rank: known[rank] for rank in causes[0].ranks if causes[0].kind is FindingKind.LOST}
            said = cause_of_others(self._view.rank, group, first, True, _OF_THIS_GROUP)
            yield group.name, Trouble.of(causes[0]) if said is None else addressed(self._view.rank, said)


def _is_after(call: Call, last: int) -> bool:
    """Return whether a rank that began ``last`` as its last collective on the group takes no part in ``call``.

    It may have done its part of earlier calls, in which the others wait for a slow rank.
    """
    return not call.is_message and call.lane == 0 and call.in_series > last


def _has_given_up(one: RankSnapshot, call: Call) -> Trouble | None:
    """Return why a rank does nothing more for a call on a group; None where it does, or what it sent may still come."""
    group = call.group
    begun = [other for other in one.collectives(group.name) if _belongs_to(one, other, call)]
    if any(not (other.is_open or other.failed) for other in begun):
        return None
    first_ns = min((other.begin_ns for other in begun), default=0)
    last_ns = one.taken_ns - int(_GRACE_S * 1e9) if begun else one.taken_ns
    for failure in one.failures:
        kind = error_class(failure.error)
        if failure.group != group.name or not first_ns <= failure.at_ns <= last_ns:
            continue
        if failure.text and kind is not None:
            return Trouble(kind, failure.text, failure.ranks)
    return None


def _belongs_to(one: RankSnapshot, other: Call, call: Call) -> bool:
    """Return whether a call of another rank is ``call`` of this one, or comes after it."""
    if numbers_agree(call.group.name):
        return other.in_series >= call.in_series
    return other.is_open or one.taken_ns - other.end_ns < time.perf_counter_ns() - call.begin_ns


def warn_of_wait(view: WorldView, call: Call, age_s: float, because: str = "") -> None:
    """Warn that a call takes long, with who is missing and what they do instead.

    Args:
        because: the beginning of the sentence, where something else than the call's age is the reason.
    """
    said = describe_missing(view, call.group) or NOBODY
    logger.warning(
        "%s%s on %s has taken %.0f s so far%s: %s",
        because,
        call.name,
        call.group,
        age_s,
        f" ({call.caller})" if call.caller else "",
        said,
    )
