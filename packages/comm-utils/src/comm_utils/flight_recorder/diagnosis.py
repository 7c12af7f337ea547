"""Find out from the snapshots of ranks what is wrong: pure functions, for errors, warnings and ``commctl postmortem``.

The ranks of a group have to make the same collectives in the same order. Each records the number of a call among the
collectives of its group, so the calls of one number belong together: where they differ, the ranks' programs differ;
where a rank has no call of that number, the others wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.matching import agreed, at_caller, by_kind, compare_calls, compare_parts, rank_list
from comm_utils.flight_recorder.message_matching import compare_messages, crossed_tags, has_come, received_from_any
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.rank_processes import NO_PROCESSES, RankProcess, describe_unseen, named_ranks

__all__ = [
    "IN_DIFFERENT_ORDERS",
    "LOOK_AHEAD",
    "Finding",
    "FindingKind",
    "collective_mismatches",
    "describe_rank",
    "diagnose",
    "diagnose_group",
    "mismatches_of",
]

#: Calls that are taken together with the one where the ranks part, to see whether one was left out.
LOOK_AHEAD = 3
#: In the text of a finding of :attr:`FindingKind.ORDER`.
IN_DIFFERENT_ORDERS = "use their groups in different orders"


class FindingKind(IntEnum):
    """The kind of a finding; causes come before their effects."""

    MISMATCH = 1
    LOST = 2
    STOPPED = 3
    ORDER = 4
    MISSING = 5


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        ranks: those that are the cause, as far as that is known.
        text: a sentence without a full stop.
        number: of the call in the group, where it concerns one.
        other_group: the second group, where two are used in different orders.
    """

    kind: FindingKind
    group: RingGroup
    ranks: tuple[int, ...]
    text: str
    number: int = 0
    other_group: RingGroup | None = None


def describe_rank(snapshot: RankSnapshot, now_ns: int | None = None) -> str:
    """Return what a rank does, as the end of a sentence that begins with its name."""
    last = snapshot.calls[-1] if snapshot.calls else None
    if snapshot.is_gone:
        return snapshot.end + (f"; its last call was {last}{at_caller(last.caller)}" if last is not None else "")
    found = "is stopped, " if snapshot.process == "stopped" else ""
    if snapshot.header.signal:
        found = f"{snapshot.end}; until then, it "
    open_calls, now = snapshot.waiting_calls(), snapshot.taken_ns if now_ns is None else now_ns
    call = next((one for one in open_calls if not one.is_on_device), None)
    if call is not None:
        return f"{found}is in {call} on {call.group}{_since(call.begin_ns, now)}{at_caller(call.caller)}"
    place = _stack_place(snapshot)
    if open_calls:
        call = open_calls[0]
        found += f"has {call} on {call.group}{at_caller(call.caller)} on its device{_since(call.begin_ns, now)}"
        return f"{found}, and its host goes on{f' at {place}' if place else ''}"
    doing = f"is in none of its calls{f', at {place}' if place else ''}"
    if last is not None:
        ended = _since(last.end_ns, now).replace("since", "which ended") + " ago" if last.end_ns else ""
        doing += f"; its last one was {last}{ended}{at_caller(last.caller)}"
    else:
        doing += ", and has made none yet"
    return found + doing


def _since(begin_ns: int, now_ns: int) -> str:
    return f" since {max(0, now_ns - begin_ns) / 1e9:.1f} s"


def _stack_place(snapshot: RankSnapshot) -> str:
    """Return the innermost line of a rank's Python stack."""
    lines = (
        [] if snapshot.stack is None else [line.strip() for line in snapshot.stack.text.splitlines() if line.strip()]
    )
    return lines[-1] if lines else ""


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
        lost = [one for one in known.values() if _is_lost(world, one, known)]
        found = [_lost(one, world) for one in sorted(lost, key=lambda one: one.rank)]
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
    calls = _collectives(known, group)
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
        if _is_lost(group, one, known):
            found.append(_lost(one, group))
        elif one.process == "stopped":
            found.append(Finding(FindingKind.STOPPED, group, (rank,), _stopped(one)))
    if waiting:
        found += _given_up(group, here, calls, waiting)
        found += _circles(known, group, waiting)
        found += _missing(known, group, calls, waiting, processes)
    # A rank that noted a failure may have ended because of it.
    noted = {rank for rank, one in here.items() if _has_failed_in(one, group)}
    return sorted(found, key=lambda one: (one.kind, one.number, not noted.isdisjoint(one.ranks), one.ranks))


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


def _is_lost(group: RingGroup, one: RankSnapshot, known: Mapping[int, RankSnapshot]) -> bool:
    """Return whether a rank has ended unexpectedly, and not because another one had before."""
    if one.is_lost:
        return not _follows_others(group, one, known)
    return _is_first_to_be_ended(one, known)


def _is_first_to_be_ended(one: RankSnapshot, known: Mapping[int, RankSnapshot]) -> bool:
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


def _stopped(snapshot: RankSnapshot) -> str:
    held = f"is stopped (SIGSTOP; kill -CONT {snapshot.header.pid} lets it go on)"
    if snapshot.debugger:
        held = f"is held by a debugger ({snapshot.debugger})"
    return f"rank {snapshot.rank} ({snapshot.where}) {held}: it {describe_rank(snapshot)}"


def _lost(snapshot: RankSnapshot, group: RingGroup) -> Finding:
    last = snapshot.open_calls() or list(snapshot.calls[-1:])
    word = "in the course of" if snapshot.open_calls() else "after"
    text = f"rank {snapshot.rank} ({snapshot.where}) {snapshot.end}"
    if last:
        text += f" {word} {last[0]} on {last[0].group}{at_caller(last[0].caller)}"
    return Finding(FindingKind.LOST, group, (snapshot.rank,), text)


def _collectives(known: Mapping[int, RankSnapshot], group: RingGroup) -> dict[int, dict[int, Call]]:
    return {
        rank: {call.in_series: call for call in known[rank].collectives(group.name)}
        for rank in group.ranks
        if rank in known
    }


# --- calls that differ


def mismatches_of(known: Mapping[int, RankSnapshot], group: RingGroup) -> list[Finding]:
    """Return the first collective of a group in which its ranks differ.

    Args:
        known: snapshots by global rank; ranks may be missing.
    """
    return collective_mismatches(group, _collectives(known, group))


def collective_mismatches(group: RingGroup, calls: Mapping[int, Mapping[int, Call]]) -> list[Finding]:
    """Return the first call of a group in which its ranks differ.

    Args:
        calls: collectives by global rank and by number in the group.
    """
    by_number: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, of_rank in calls.items():
        for number, call in of_rank.items():
            by_number[number][rank] = call
    for number in sorted(by_number):
        at = by_number[number]
        where = f"in call {number} of {group}"
        text, culprits = compare_calls(at, where)
        if text:
            text += _left_out(number, at, calls)
        else:
            text, culprits = compare_parts(group, at, where)
        if text:
            return [Finding(FindingKind.MISMATCH, group, culprits, text, number)]
    return []


def _left_out(number: int, at: Mapping[int, Call], calls: Mapping[int, Mapping[int, Call]]) -> str:
    """Return whether a rank left a call out, or made one more, as far as the calls after it tell."""
    usual, ordered = by_kind(at)
    if usual is None or len(ordered) != 2:
        return ""
    many, few = ordered[0][0], ordered[1][0]
    for shift in range(1, LOOK_AHEAD + 1):
        later = calls[many].get(number + shift)
        if later is not None and agreed(later) == agreed(at[few]):
            word = "call" if shift == 1 else f"{shift} calls"
            return (
                f" (the same as the others' call {number + shift}: {rank_list(ordered[1])} left out {word}, it seems)"
            )
        later = calls[few].get(number + shift)
        if later is not None and agreed(later) == usual:
            word = "a call" if shift == 1 else f"{shift} calls"
            return f" ({rank_list(ordered[1])} made {word} more than the others, it seems)"
    return ""


# --- ranks that are awaited


def _given_up(
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
        if _follows_others(group, one, here):
            continue
        if any(not call.is_message and call.in_series >= last.in_series for call in waiting.values()):
            text = f"rank {rank} ({one.where}) {one.end} in the course of {last} on {group}{at_caller(last.caller)}"
            found.append(Finding(FindingKind.LOST, group, (rank,), text, last.in_series))
    return found


def _follows_others(group: RingGroup, one: RankSnapshot, here: Mapping[int, RankSnapshot]) -> bool:
    """Return whether a rank has gone because one of ``here`` had gone before, which is the cause then."""
    causes = {rank for failure in one.failures if failure.group == group.name for rank in failure.ranks}
    return any(
        here[rank].is_gone and all(failure.group != group.name for failure in here[rank].failures)
        for rank in causes - {one.rank}
        if rank in here
    )


class _Awaited:
    """Finds out which ranks have not begun what belongs to the calls in which others wait, for one group.

    Args:
        calls: collectives by global rank and by number in the group.
    """

    def __init__(
        self, group: RingGroup, known: Mapping[int, RankSnapshot], calls: Mapping[int, Mapping[int, Call]]
    ) -> None:
        self._group, self._known = group, known
        # The number of the last collective of each rank; 0 of none.
        latest = {rank: max(of_rank, default=0) for rank, of_rank in calls.items()}
        self._latest = {rank: latest.get(rank, 0) for rank in group.ranks}
        # Of a large group, very many ranks wait in one call.
        self._behind: dict[int, list[int]] = {}
        self.from_any = cache(partial(received_from_any, group, known))

    def _ranks(self, rank: int, call: Call) -> list[int]:
        """Return the ranks that have not begun what belongs to a call of ``rank``."""
        group, known = self._group, self._known
        if call.is_message:
            if call.peer < 0:  # from any rank: one that lives is enough
                others = (other for other in group.ranks if other != rank)
                is_hopeless = all(other in known and known[other].is_gone for other in others)
                return [other for other in group.ranks if other != rank] if is_hopeless else []
            has_peer = call.peer == rank or has_come(group, rank, call, known, self.from_any)
            return [] if has_peer else [call.peer]
        if call.in_series not in self._behind:
            self._behind[call.in_series] = [one for one, last in self._latest.items() if last < call.in_series]
        return [one for one in self._behind[call.in_series] if one != rank]

    def first_missed(self, rank: int, call: Call) -> tuple[Call, list[int]]:
        """Return the call of ``rank`` that others have not begun, and which: ``call`` or a later one on its device."""
        awaited = self._ranks(rank, call)
        if not awaited and call.is_on_device and len(self._latest) > 1:
            least = min(last for other, last in self._latest.items() if other != rank)
            for one in self._known[rank].calls_on_device(self._group.name):
                if not one.is_message and one.in_series > least:
                    return one, self._ranks(rank, one)
        return call, awaited


def _circles(known: Mapping[int, RankSnapshot], group: RingGroup, waiting: Mapping[int, Call]) -> list[Finding]:
    """Return two ranks that wait for each other in different groups."""

    @cache
    def latest(rank: int, name: str) -> int:
        """Return the number of the last collective of a rank on a group; -1 of none."""
        return max((one.in_series for one in known[rank].collectives(name)), default=-1)

    members = cache(frozenset[int])
    # By rank, the collective on another group in which it waits.
    elsewhere: dict[int, Call] = {}
    for rank in group.ranks:
        waits = () if rank not in known else known[rank].waiting_calls()
        theirs = next((one for one in waits if not one.is_message), None)
        if theirs is not None and theirs.group.name != group.name:
            elsewhere[rank] = theirs
    for rank, call in waiting.items():
        for other, theirs in elsewhere.items():
            if other == rank or call.is_message:
                continue
            if call.is_on_device or theirs.is_on_device:  # the host may still come
                continue
            if rank not in members(theirs.group.ranks):
                continue
            if call.is_limited or theirs.is_limited:  # that ends by itself
                continue
            # Who calls on a group has made it.
            if _is_step_of(call.group, theirs.group) or _is_step_of(theirs.group, call.group):
                continue
            if known[rank].threads > 1 or known[other].threads > 1:  # another thread may still come
                continue
            # A rank that has given up in a group makes no call there any more, which is found without the order.
            if _has_failed_in(known[rank], theirs.group) or _has_failed_in(known[other], group):
                continue
            if latest(rank, theirs.group.name) >= theirs.in_series or latest(other, group.name) >= call.in_series:
                continue
            first, second = sorted(((rank, call), (other, theirs)), key=lambda one: one[0])
            text = (
                f"ranks {first[0]} and {second[0]} {IN_DIFFERENT_ORDERS} and wait for each other: "
                f"rank {first[0]} is in {first[1]} on {_named(first[1].group)}{at_caller(first[1].caller)}, rank "
                f"{second[0]} in {second[1]} on {_named(second[1].group)}{at_caller(second[1].caller)}"
            )
            ranks = first[0], second[0]
            return [Finding(FindingKind.ORDER, group, ranks, text, call.in_series, theirs.group)]
    return []


def _is_step_of(step: RingGroup, group: RingGroup) -> bool:
    """Return whether ``step`` has the waits of a group's members in a store, such as those to make it."""
    return step.name.startswith(f"{group.name} (")


def _has_failed_in(one: RankSnapshot, group: RingGroup) -> bool:
    return any(failure.group == group.name for failure in one.failures)


def _named(group: RingGroup) -> str:
    """Return a group with its name, as several may have the same ranks."""
    return f"{group}, named {group.name!r}"


def _missing(
    known: Mapping[int, RankSnapshot],
    group: RingGroup,
    calls: Mapping[int, Mapping[int, Call]],
    waiting: Mapping[int, Call],
    processes: Mapping[int, RankProcess],
) -> list[Finding]:
    """Return the ranks that others wait for, and what they do instead."""
    found: list[Finding] = []
    reported: set[int] = set()
    crossed: set[int] = set()
    all_awaited = _Awaited(group, known, calls)
    for sender, receiver, text in crossed_tags(group, waiting, known, all_awaited.from_any):
        crossed |= {sender, receiver}
        number = waiting[sender].in_series
        found.append(Finding(FindingKind.MISSING, group, tuple(sorted((sender, receiver))), text, number))
    for rank, first in sorted(waiting.items(), key=lambda one: one[1].in_series):
        if rank in crossed:
            continue
        call, awaited = all_awaited.first_missed(rank, first)
        missed = call.name if not call.is_message else "recv" if call.is_send else "send"
        others = [one for one in awaited if one not in reported]
        reported.update(others)
        far = tuple(one for one in others if one not in known)
        if far:  # one finding for all of them: in a large job, they are thousands
            text = (
                f"{named_ranks(far, processes)} may not have called {missed}, for which "
                f"{_waiting_for(call, rank, waiting)}: {describe_unseen(far, processes)}"
            )
            found.append(Finding(FindingKind.MISSING, group, far, text, call.in_series))
        for other in others:
            one = known.get(other)
            if one is None:
                continue
            text = (
                f"rank {other} ({one.where}) has not called {missed}, for which "
                f"{_waiting_for(call, rank, waiting, other)}: it {describe_rank(one)}"
            )
            if call.in_series > first.in_series and not first.is_message:
                before = call.in_series - first.in_series
                text += f" (the device of rank {rank} may be in one of the {before} calls before, which all have made)"
            is_cause = one.is_gone and (not one.header.signal or _is_first_to_be_ended(one, known))
            is_cause = is_cause and not _follows_others(group, one, known)
            kind = FindingKind.LOST if is_cause else FindingKind.MISSING
            found.append(Finding(kind, group, (other,), text, call.in_series))
    return found


def _waiting_for(call: Call, rank: int, waiting: Mapping[int, Call], other: int = -1) -> str:
    """Return who waits for ``other``, or for ranks that nobody sees, in a call such as that of ``rank``."""
    same = [one for one, theirs in waiting.items() if theirs.is_message == call.is_message and one != other]
    them = [rank] if call.is_message or not same else same
    return f"{rank_list(them)} {'waits' if len(them) == 1 else 'wait'}"
