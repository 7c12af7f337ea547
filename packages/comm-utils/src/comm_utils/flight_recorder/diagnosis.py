"""Find out from the snapshots of ranks what is wrong: pure functions, for errors, warnings and ``commctl postmortem``.

The ranks of a group have to make the same collectives in the same order. Each records the number of a call among the
collectives of its group, so the calls of one number belong together: where they differ, the ranks' programs differ;
where a rank has no call of that number, the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comm_utils.flight_recorder.awaited_ranks import find_circles, find_missing
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.differing_calls import collective_mismatches, collectives_of
from comm_utils.flight_recorder.ended_ranks import find_given_up, has_failed_in, is_lost, lost, stopped
from comm_utils.flight_recorder.findings import Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.message_matching import compare_messages
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.rank_processes import NO_PROCESSES, RankProcess

__all__ = ["diagnose", "diagnose_group"]


def diagnose(snapshots: Sequence[RankSnapshot]) -> list[Finding]:
    """Return what is wrong in a job, causes first.

    Args:
        snapshots: of all ranks that can be seen.
    """
    groups = {call.group.name: call.group for one in snapshots for call in one.calls if call.group.ranks}
    known = {one.rank: one for one in snapshots}
    found = [finding for group in groups.values() for finding in diagnose_group(known, group)]
    if not found:  # a rank may have died outside of all calls
        world = RingGroup("", tuple(sorted(known)))
        gone = [one for one in known.values() if is_lost(world, one, known)]
        found = [lost(one, world) for one in sorted(gone, key=lambda one: one.rank)]
    unique = {
        (one.kind, one.ranks if one.kind in (FindingKind.LOST, FindingKind.STOPPED) else one.text): one for one in found
    }
    return sorted(unique.values(), key=lambda one: (one.kind, one.number, one.ranks))


def diagnose_group(
    known: Mapping[int, RankSnapshot], group: RingGroup, processes: Mapping[int, RankProcess] = NO_PROCESSES
) -> list[Finding]:
    """Return what is wrong in one group, causes first.

    Args:
        known: snapshots by global rank; ranks may be missing.
        processes: of the ranks that are missing, as far as they are known.
    """
    here = {rank: known[rank] for rank in group.ranks if rank in known}
    calls = collectives_of(known, group)
    found = collective_mismatches(group, calls)
    text, ranks, number = compare_messages(group, here)
    if text:
        found.append(Finding(FindingKind.MISMATCH, group, ranks, text, number))
    waiting = {
        rank: call for rank, one in here.items() for call in one.waiting_calls() if call.group.name == group.name
    }
    needed = _needed(group, here, waiting)
    for rank, one in here.items():
        if rank not in needed:
            continue
        if is_lost(group, one, known):
            found.append(lost(one, group))
        elif one.process == "stopped":
            found.append(Finding(FindingKind.STOPPED, group, (rank,), stopped(one)))
    if waiting:
        found += find_given_up(group, here, calls, waiting)
        found += find_circles(known, group, waiting)
        found += find_missing(known, group, calls, waiting, processes)
        found = found or _silent(group, here, waiting)
    # A rank that noted a failure may have ended because of it.
    noted = {rank for rank, one in here.items() if has_failed_in(one, group)}
    return sorted(found, key=lambda one: (one.kind, one.number, not noted.isdisjoint(one.ranks), one.ranks))


def _silent(group: RingGroup, here: Mapping[int, RankSnapshot], waiting: Mapping[int, Call]) -> list[Finding]:
    """Return the ranks that are in a collective like the others, and whose watches give no sign."""
    return [
        Finding(
            FindingKind.MISSING,
            group,
            (rank,),
            f"rank {rank} ({here[rank].where}) does not go on: it {describe_rank(here[rank])}",
            call.in_series,
        )
        for rank, call in waiting.items()
        if here[rank].silent_ns and not call.is_message
    ]


def _needed(group: RingGroup, here: Mapping[int, RankSnapshot], waiting: Mapping[int, Call]) -> set[int]:
    """Return the ranks without which the calls that wait cannot go on; all where none waits."""
    if not waiting:
        return set(here)
    needed: set[int] = set()
    for rank, call in waiting.items():
        if not call.is_message:
            return set(here)
        if call.peer >= 0:
            needed.add(call.peer)
        elif all(one.is_gone for other, one in here.items() if other != rank):  # of any rank, one that lives is enough
            needed |= set(here) - {rank}
    return needed
