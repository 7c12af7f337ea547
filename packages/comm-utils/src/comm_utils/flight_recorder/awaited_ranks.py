"""Ranks that others wait for, and ranks that wait for each other."""

from __future__ import annotations

from collections import deque
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

# What the root of a call has sent may still be on its way.
_MOVES_NS = 1_000_000_000


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
    """Return ranks that wait for each other in different groups: two, or more in a circle, as few as there are.

    Args:
        waiting: the ranks that wait in a call on ``group``, and these calls.
    """
    waits: dict[int, Call] = {}
    for rank, one in known.items():
        call = next((call for call in one.waiting_calls() if not call.is_message), None)
        # On a device, the host may still come; with a limit, it ends by itself; another thread may still come.
        if call is not None and not call.is_on_device and not call.is_limited and one.threads <= 1:
            waits[rank] = call
    circles = _Circles(known, waits)
    here = [waits[rank] for rank in waiting if rank in waits and waits[rank].group.name == group.name]
    found = [circle for key in dict.fromkeys(map(_key, here)) if (circle := circles.shortest(key))]
    if not found:
        return []
    shortest = min(found, key=lambda circle: len(circle))
    circle = sorted(shortest, key=lambda one: one[0])
    places = [
        f"rank {rank} {'is ' if not place else ''}in {call} on {_named(call.group)}{at_caller(call.caller)}"
        for place, (rank, call) in enumerate(circle)
    ]
    ranks = tuple(rank for rank, _ in circle)
    text = f"{rank_list(ranks)} {IN_DIFFERENT_ORDERS} and wait for each other: {', '.join(places)}"
    if len(circle) == 2:
        fewer, most = _outnumbered(waits, *(call for _, call in circle))
        text += f"; {rank_list(most)} are in the same call" if fewer else ""
        ranks = fewer or ranks
    number, others = 0, []
    for _, call in circle:
        if call.group.name == group.name:
            number = call.in_series
        else:
            others.append(call.group)
    return [Finding(FindingKind.ORDER, group, ranks, text, number, tuple(others))]


def _key(call: Call) -> tuple[str, int]:
    return call.group.name, call.in_series


class _Circles:
    """Finds calls that cannot go on as a rank that each needs waits in the next of them.

    Args:
        waits: by global rank, the collective in which it waits and which it does not leave by itself.
    """

    def __init__(self, known: Mapping[int, RankSnapshot], waits: Mapping[int, Call]) -> None:
        self._known, self._waits = known, waits
        self._calls = {_key(call): call for call in reversed(list(waits.values()))}
        self._latest = cache(self._find_latest)

    def _find_latest(self, rank: int, name: str) -> int:
        """Return the number of the last collective of a rank on a group; -1 of none."""
        return max((one.in_series for one in self._known[rank].collectives(name)), default=-1)

    def _needed(self, call: Call) -> tuple[int, ...]:
        """Return the ranks each of which a call needs: its root alone until that has come, as others may go on then."""
        if call.root < 0:
            return call.group.ranks
        one = self._known.get(call.root)
        of_root = () if one is None else one.collectives(call.group.name)
        come = [theirs for theirs in of_root if theirs.in_series >= call.in_series]
        first = min(come, key=lambda theirs: theirs.in_series, default=None)
        if one is None or first is None or one.taken_ns - (first.end_ns or first.begin_ns) < _MOVES_NS:
            return (call.root,)
        return call.group.ranks

    def _next(self, call: Call) -> dict[tuple[str, int], int]:
        """Return the calls in which ranks wait that have not come to ``call``, and the first such rank of each."""
        found: dict[tuple[str, int], int] = {}
        name = call.group.name
        for rank in self._needed(call):
            theirs = self._waits.get(rank)
            if theirs is None or theirs.group.name == name or self._latest(rank, name) >= call.in_series:
                continue
            # Who calls on a group has made it.
            if is_step_of(name, theirs.group.name) or is_step_of(theirs.group.name, name):
                continue
            # A rank that has given up in a group makes no call there any more, which is found without the order.
            if not has_failed_in(self._known[rank], call.group):
                found.setdefault(_key(theirs), rank)
        return found

    def shortest(self, start: tuple[str, int]) -> list[tuple[int, Call]]:
        """Return a circle through a call, as ranks and the calls in which they wait; nothing where there is none."""
        came_from: dict[tuple[str, int], tuple[tuple[str, int], int]] = {}
        queue = deque([start])
        while queue:
            key = queue.popleft()
            for other, rank in self._next(self._calls[key]).items():
                if other == start:
                    circle = [(rank, self._calls[start])]
                    while key != start:
                        before, witness = came_from[key]
                        circle.append((witness, self._calls[key]))
                        key = before
                    return circle
                if other not in came_from:
                    came_from[other] = (key, rank)
                    queue.append(other)
        return []


def _outnumbered(waits: Mapping[int, Call], call: Call, theirs: Call) -> tuple[tuple[int, ...], list[int]]:
    """Return the fewer of those in ``call`` and in ``theirs``, on another group of the same ranks, and the others.

    Both are empty where they are as many, or the groups have other ranks.
    """
    if {*call.group.ranks} != {*theirs.group.ranks}:
        return (), []
    here, there = ([rank for rank, one in waits.items() if _key(one) == _key(call)] for call in (call, theirs))
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
