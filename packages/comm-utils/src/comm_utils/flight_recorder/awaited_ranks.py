"""Ranks that others wait for, and ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.differing_calls import collectives_of
from comm_utils.flight_recorder.ended_ranks import follows_others, has_failed_in, is_first_to_be_ended
from comm_utils.flight_recorder.findings import IN_DIFFERENT_ORDERS, Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.matching import at_caller, rank_list
from comm_utils.flight_recorder.message_matching import crossed_tags, has_come, received_from_any
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.flight_recorder.store_steps import is_step_of, numbers_agree
from comm_utils.rank_processes import RankProcess, describe_unseen, named_ranks

__all__ = ["awaited_ranks", "find_circles", "find_missing"]


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
        self._numbers_agree, self._in_no_call = numbers_agree(group.name), cache(self._find_in_no_call)
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
        if not self._numbers_agree:  # a rank that has come waits as well
            return [one for one in self._in_no_call() if one != rank]
        if call.in_series not in self._behind:
            self._behind[call.in_series] = [one for one, last in self._latest.items() if last < call.in_series]
        return [one for one in self._behind[call.in_series] if one != rank]

    def _find_in_no_call(self) -> list[int]:
        known, name = self._known, self._group.name
        return [
            one
            for one in self._group.ranks
            if one not in known or not any(call.is_open for call in known[one].collectives(name))
        ]

    def first_missed(self, rank: int, call: Call) -> tuple[Call, list[int]]:
        """Return the call of ``rank`` that others have not begun, and which: ``call`` or a later one on its device."""
        awaited = self._ranks(rank, call)
        if not awaited and call.is_on_device and len(self._latest) > 1:
            least = min(last for other, last in self._latest.items() if other != rank)
            for one in self._known[rank].calls_on_device(self._group.name):
                if not one.is_message and one.in_series > least:
                    return one, self._ranks(rank, one)
        return call, awaited


def awaited_ranks(known: Mapping[int, RankSnapshot]) -> dict[int, list[int]]:
    """Return the ranks that have not begun what belongs to the oldest call in which a rank waits, for each that does.

    Args:
        known: snapshots by global rank; ranks may be missing.
    """
    waiting = {rank: calls[0] for rank, one in known.items() if (calls := one.waiting_calls())}
    groups = {call.group.name: call.group for call in waiting.values()}
    of_groups = {name: _Awaited(group, known, collectives_of(known, group)) for name, group in groups.items()}
    return {rank: of_groups[call.group.name].first_missed(rank, call)[1] for rank, call in waiting.items()}


def find_circles(known: Mapping[int, RankSnapshot], group: RingGroup, waiting: Mapping[int, Call]) -> list[Finding]:
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
            if is_step_of(call.group.name, theirs.group.name) or is_step_of(theirs.group.name, call.group.name):
                continue
            if known[rank].threads > 1 or known[other].threads > 1:  # another thread may still come
                continue
            # A rank that has given up in a group makes no call there any more, which is found without the order.
            if has_failed_in(known[rank], theirs.group) or has_failed_in(known[other], group):
                continue
            if latest(rank, theirs.group.name) >= theirs.in_series or latest(other, group.name) >= call.in_series:
                continue
            first, second = sorted(((rank, call), (other, theirs)), key=lambda one: one[0])
            text = (
                f"ranks {first[0]} and {second[0]} {IN_DIFFERENT_ORDERS} and wait for each other: "
                f"rank {first[0]} is in {first[1]} on {_named(first[1].group)}{at_caller(first[1].caller)}, rank "
                f"{second[0]} in {second[1]} on {_named(second[1].group)}{at_caller(second[1].caller)}"
            )
            ranks, most = _outnumbered(waiting, call, elsewhere, theirs)
            text += f"; {rank_list(most)} are in the same call" if ranks else ""
            ranks = ranks or (first[0], second[0])
            return [Finding(FindingKind.ORDER, group, ranks, text, call.in_series, theirs.group)]
    return []


def _outnumbered(
    waiting: Mapping[int, Call], call: Call, elsewhere: Mapping[int, Call], theirs: Call
) -> tuple[tuple[int, ...], list[int]]:
    """Return the fewer of those in ``call`` and in ``theirs``, on another group of the same ranks, and the others.

    Both are empty where they are as many, or the groups have other ranks.
    """
    if {*call.group.ranks} != {*theirs.group.ranks}:
        return (), []
    here = [rank for rank, one in waiting.items() if not one.is_message and one.in_series == call.in_series]
    there = [
        rank
        for rank, one in elsewhere.items()
        if (one.group.name, one.in_series) == (theirs.group.name, theirs.in_series)
    ]
    fewer, most = sorted((sorted(here), sorted(there)), key=len)
    return ((), []) if len(fewer) == len(most) else (tuple(fewer), most)


def _named(group: RingGroup) -> str:
    """Return a group with its name, as several may have the same ranks."""
    return f"{group}, named {group.name!r}"


def find_missing(
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
                f"{_waiting_for(call, rank, waiting, other)}: it {describe_rank(one, awaited_in=group)}"
            )
            if call.in_series > first.in_series and not first.is_message:
                before = call.in_series - first.in_series
                text += f" (the device of rank {rank} may be in one of the {before} calls before, which all have made)"
            is_cause = one.is_gone and (not one.header.signal or is_first_to_be_ended(one, known))
            is_cause = is_cause and not follows_others(group, one, known)
            kind = FindingKind.LOST if is_cause else FindingKind.MISSING
            found.append(Finding(kind, group, (other,), text, call.in_series))
    return found


def _waiting_for(call: Call, rank: int, waiting: Mapping[int, Call], other: int = -1) -> str:
    """Return who waits for ``other``, or for ranks that nobody sees, in a call such as that of ``rank``."""
    same = [one for one, theirs in waiting.items() if theirs.is_message == call.is_message and one != other]
    them = [rank] if call.is_message or not same else same
    return f"{rank_list(them)} {'waits' if len(them) == 1 else 'wait'}"
