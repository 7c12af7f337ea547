"""Follow a wait from group to group: a rank may be late as it waits in a call on another group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.watch.world_view import WorldView

__all__ = ["follow_waits"]

# All questions to ranks of other hosts together: the caller may have asked before, in the thread of the watch.
_ASK_S = 0.5
# So long a chain of groups is followed: a mesh of four dimensions has as many groups a rank.
_MOST_GROUPS = 4
# So many ranks are not asked, as many others may ask them at the same time.
_LARGE = 64


def follow_waits(
    view: WorldView, group: RingGroup, findings: Sequence[Finding], known: dict[int, RankSnapshot], asks: bool = True
) -> list[list[Finding]]:
    """Return what is wrong in the groups in which the missing ranks of a group wait, one group after another.

    The last ones name the cause. Nothing is returned where a rank is missing that waits for no other, as that is the
    cause, or where the waits lead back to this rank.

    Args:
        findings: of ``group``.
        known: snapshots by global rank, of other hosts too; those of ranks that are asked are added.
        asks: ranks of other hosts that are not known.
    """
    found: list[list[Finding]] = []
    seen, end = {group.name}, time.monotonic() + _ASK_S
    while len(found) < _MOST_GROUPS:
        call = _next_wait(findings, known)
        if call is None or call.group.name in seen:
            break
        seen.add(call.group.name)
        unseen = [rank for rank in call.group.ranks if rank not in known]
        if asks and 0 < len(unseen) < _LARGE and time.monotonic() < end:
            known |= view.ask(unseen, end - time.monotonic())
        findings = [
            one
            for one in diagnose_group(known, call.group, view.processes)
            if not call.is_message or call.peer in one.ranks
        ]
        if not findings or any(view.rank in one.ranks for one in findings):
            break
        found.append(findings)
    return found


def _next_wait(findings: Sequence[Finding], known: Mapping[int, RankSnapshot]) -> Call | None:
    """Return the oldest call in which the ranks that are missing wait; None where one of them waits in none."""
    calls: list[tuple[int, Call]] = []
    for rank in sorted({rank for one in findings for rank in one.ranks}):
        if rank not in known or known[rank].is_gone or known[rank].process == "stopped" or known[rank].silent_ns:
            return None
        waiting = [call for call in known[rank].waiting_calls() if not call.is_on_device and call.group.ranks]
        if not waiting:
            return None
        calls.append((known[rank].taken_ns - waiting[0].begin_ns, waiting[0]))  # the clocks of hosts differ
    if not calls or any(one.kind is not FindingKind.MISSING for one in findings):
        return None
    return max(calls, key=lambda one: one[0])[1]
