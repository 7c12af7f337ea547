"""The cause of a call that failed: what the rings show within a second, and what ranks of other hosts say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from comm_utils.errors import CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import IN_DIFFERENT_ORDERS, Finding, FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.watch.comparison import complete_within_s
from comm_utils.watch.explanation import (
    addressed,
    age_of_failed_call,
    all_in_call,
    cause_of_others,
    combined,
    is_complete,
    last_to_come,
    until_failed_call,
)
from comm_utils.watch.indirect_waits import follow_waits
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView

__all__ = ["find_cause"]

# How long a call that failed looks for the cause, and with a weak one after a timeout.
_LOOK_S, _SHORT_LOOK_S = 0.9, 0.2
# How long it takes until all hear what a few ranks of a large group have found.
_HEAR_S = 2.5


def find_cause(
    view: WorldView,
    broken: Mapping[str, Trouble],
    failing: Mapping[str, Trouble],
    group: RingGroup,
    timed_out: bool,
) -> Trouble | None:
    """Return the cause of a failed call, as this rank is to raise it; None where nothing is found in a second.

    Args:
        broken: the groups that are in trouble; the watch's thread adds to them.
        failing: the groups in which other ranks have raised, and why; likewise.
        timed_out: the call ran into its timeout; otherwise its connections were closed, and why may only now become
            visible, such as the end of a process.
    """
    was_known = group.name in broken
    found = _look_for_cause(view, broken, failing, group, timed_out)
    if found is None:
        return None
    if timed_out and not was_known and IN_DIFFERENT_ORDERS in found.text:
        # The timeout is shorter than the watch takes to find that.
        found = Trouble(CommTimeoutError, found.text, found.ranks)
    return addressed(view.rank, found)


def _look_for_cause(
    view: WorldView,
    broken: Mapping[str, Trouble],
    failing: Mapping[str, Trouble],
    group: RingGroup,
    timed_out: bool,
) -> Trouble | None:
    begin = time.monotonic()
    end = begin + _LOOK_S
    asked: dict[int, RankSnapshot] = {}
    weak: Trouble | None = None
    findings: list[Finding] = []
    known: dict[int, RankSnapshot] = {}
    while view.own is not None:
        known = {**asked, **view.snapshots()}
        own = known.get(view.rank)
        findings = diagnose_group(known, group, view.processes)
        if timed_out:
            findings = until_failed_call(findings, own, group)
        found = broken.get(group.name)
        first = findings[0].kind if findings else None
        if found is None and first is FindingKind.MISMATCH:
            # The others may be about to make the same call: then all of them are named.
            if time.monotonic() < begin + complete_within_s(len(group.ranks)) and not is_complete(findings[0], known):
                time.sleep(0.01)
                continue
            found = combined(view.rank, findings, known)
        if found is None:  # a rank that gave up may have left since, which is an effect
            age_ns = age_of_failed_call(own, group, time.perf_counter_ns())
            found = cause_of_others(view.rank, group, known, first is FindingKind.LOST, age_ns)
        if found is None and first is FindingKind.LOST:
            found = combined(view.rank, findings, known)
        if found is not None:
            return found
        if findings:
            weak = combined(view.rank, findings, known)
            if not timed_out and weak.kind is CommTimeoutError and not set(weak.ranks) <= known.keys():
                weak = Trouble(PeerLostError, weak.text, weak.ranks)  # who closed the connections has left
            if timed_out and time.monotonic() - begin >= _SHORT_LOOK_S:
                break
        elif timed_out and weak is None:
            weak = last_to_come(own, group, known) or all_in_call(own, group, known)
            if weak is not None:
                break
        unseen = [rank for rank in group.ranks if rank not in known]
        if unseen and not asked:
            if view.remote.leaves_asking_to_others(group.name, len(unseen), max(0.1, end - time.monotonic())):
                return _heard(broken, failing, group.name, begin + _HEAR_S) or weak
            asked = view.ask(unseen, max(0.1, end - time.monotonic()), lambda: group.name in broken)
            if asked or group.name in broken:
                weak = None  # what was not seen then is seen now
                continue
        if time.monotonic() >= end:
            break
        time.sleep(0.02)
    return weak if weak is None or not findings else _behind(view, group, weak, findings, known)


def _behind(
    view: WorldView, group: RingGroup, weak: Trouble, findings: Sequence[Finding], known: dict[int, RankSnapshot]
) -> Trouble:
    """Return a cause with what the missing ranks wait for in other groups, as far as they do."""
    behind = [combined(view.rank, one, known) for one in follow_waits(view, group, findings, known)]
    again = diagnose_group(known, group, view.processes)  # with those of other hosts that were asked now
    if again and again[0].kind is FindingKind.ORDER:
        return Trouble.of(again[0])
    text = ". There, ".join([weak.text, *(one.text for one in behind)])
    return Trouble(behind[-1].kind, text, behind[-1].ranks) if behind else weak


def _heard(broken: Mapping[str, Trouble], failing: Mapping[str, Trouble], group: str, end: float) -> Trouble | None:
    """Return what another rank finds about a group, once this one hears of it; None where it does not in time."""
    while group not in broken and group not in failing and time.monotonic() < end:
        time.sleep(0.05)
    return broken.get(group) or failing.get(group)
