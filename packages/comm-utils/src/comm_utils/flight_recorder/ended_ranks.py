"""Ranks that have ended, stopped or given up, and whether they are the cause of it or follow others."""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.findings import Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.matching import at_caller
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.flight_recorder.store_steps import numbers_agree

__all__ = ["find_given_up", "follows_others", "has_failed_in", "is_first_to_be_ended", "is_lost", "lost", "stopped"]


def is_lost(group: RingGroup, one: RankSnapshot, known: Mapping[int, RankSnapshot]) -> bool:
    """Return whether a rank has ended unexpectedly, and not because another one had before."""
    if one.is_lost:
        return not follows_others(group, one, known)
    return is_first_to_be_ended(one, known)


def is_first_to_be_ended(one: RankSnapshot, known: Mapping[int, RankSnapshot]) -> bool:
    """Return whether a rank was ended by a signal, and not by a launcher after another rank had failed."""
    if one.process != "ended" or not one.header.signal:
        return False
    for other in known.values():
        if other is one:
            continue
        if other.is_gone and not other.header.signal and not _names(other, one.rank):
            return False
        if any(one.rank not in failure.ranks for failure in other.failures):
            return False
    return True


def _names(snapshot: RankSnapshot, rank: int) -> bool:
    """Return whether a rank failed because of ``rank``."""
    return any(rank in failure.ranks for failure in snapshot.failures)


def stopped(snapshot: RankSnapshot) -> str:
    held = f"is stopped (SIGSTOP; kill -CONT {snapshot.header.pid} lets it go on)"
    if snapshot.debugger:
        held = f"is held by a debugger ({snapshot.debugger})"
    return f"rank {snapshot.rank} ({snapshot.where}) {held}: it {describe_rank(snapshot)}"


def lost(snapshot: RankSnapshot, group: RingGroup) -> Finding:
    last = snapshot.open_calls() or list(snapshot.calls[-1:])
    word = "in the course of" if snapshot.open_calls() else "after"
    text = f"rank {snapshot.rank} ({snapshot.where}) {snapshot.end}"
    if last:
        text += f" {word} {last[0]} on {last[0].group}{at_caller(last[0].caller)}"
    # A rank that fails otherwise says why, and the kernel kills for lack of memory by SIGKILL.
    if snapshot.oom_kills and not snapshot.failures and snapshot.may_be_killed:
        killed = "a process" if snapshot.oom_kills == 1 else f"{snapshot.oom_kills} processes"
        text += f"; since the start, the kernel has killed {killed} of this host for lack of memory (see dmesg)"
    return Finding(FindingKind.LOST, group, (snapshot.rank,), text)


def find_given_up(
    group: RingGroup,
    here: Mapping[int, RankSnapshot],
    calls: Mapping[int, Mapping[int, Call]],
    waiting: Mapping[int, Call],
) -> list[Finding]:
    """Return the ranks that have gone without an end of the call in which others wait."""
    found = []
    for rank, one in here.items():
        mine = calls[rank]
        last = mine[max(mine)] if mine else None
        if not one.is_gone or one.is_lost or one.header.signal or last is None or not (last.is_open or last.failed):
            continue
        if follows_others(group, one, here):
            continue
        calls_of_others = [(here[other], call) for other, call in waiting.items() if not call.is_message]
        if any(_is_in_course_of(one, last, other, call) for other, call in calls_of_others):
            text = f"rank {rank} ({one.where}) {one.end} in the course of {last} on {group}{at_caller(last.caller)}"
            found.append(Finding(FindingKind.LOST, group, (rank,), text, last.in_series))
    return found


def _is_in_course_of(one: RankSnapshot, last: Call, other: RankSnapshot, call: Call) -> bool:
    """Return whether ``other`` waits in ``call`` for ``one``, which has gone and gave up its ``last`` call."""
    if numbers_agree(call.group.name):
        return call.in_series >= last.in_series
    # The group goes on after a call that failed. Clocks of hosts differ.
    return last.is_open or one.taken_ns - last.end_ns < other.taken_ns - call.begin_ns


def follows_others(group: RingGroup, one: RankSnapshot, here: Mapping[int, RankSnapshot]) -> bool:
    """Return whether a rank has gone because one of ``here`` had gone before, which is the cause then."""
    causes = {rank for failure in one.failures if failure.group == group.name for rank in failure.ranks}
    return any(
        here[rank].is_gone and all(failure.group != group.name for failure in here[rank].failures)
        for rank in causes - {one.rank}
        if rank in here
    )


def has_failed_in(one: RankSnapshot, group: RingGroup) -> bool:
    return any(failure.group == group.name for failure in one.failures)
