"""Compare the calls of ranks after they were made, by the digests in their rings.

Each record has a digest of the call and of all calls before it in its group. Two ranks whose digests of one number are
equal have made the same calls up to there, so one comparison at a time covers all of them, however many there were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.differing_calls import LOOK_AHEAD, collective_mismatches
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.matching import rank_list
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.scanning import Mark, calls_numbered, digests, marks, native_marks

__all__ = [
    "Marks",
    "complete_within_s",
    "differ_by",
    "disagreement",
    "first_difference",
    "marks_by_group",
    "mismatch",
    "native_disagreement",
    "native_mismatch",
    "neighbours",
]

#: The latest collectives that Python recorded, by group and by number in the group.
Marks = dict[str, dict[int, Mark]]
# Calls of the newest records that are looked at, and how many where these have no number in common.
_DEPTH, _FULL_DEPTH = 32, 512
_FEW_RANKS = 4
# How long ranks may be about to make the call in which others differ.
_COMPLETE_S, _COMPLETE_S_OF_A_RANK, _MOST_COMPLETE_S = 0.2, 0.05, 1.0


def marks_by_group(ring: RingReader, depth: int = _DEPTH) -> Marks:
    """Return the latest collectives of a ring; see :data:`Marks`."""
    found: Marks = {}
    for mark in marks(ring, depth):
        found.setdefault(mark.group, {})[mark.in_series] = mark
    return found


def disagreement(own: RingReader, other: RingReader) -> Iterable[tuple[str, bool]]:
    """Yield the names of groups in which two ranks have made different calls, or may have; and whether they have."""
    mine, theirs = marks_by_group(own), marks_by_group(other)
    if any(group in theirs and not calls.keys() & theirs[group].keys() for group, calls in mine.items()):
        mine, theirs = marks_by_group(own, _FULL_DEPTH), marks_by_group(other, _FULL_DEPTH)
    for group, calls in mine.items():
        others = theirs.get(group, {})
        common = calls.keys() & others.keys()
        if not common:
            continue
        last = max(common)
        if calls[last].digest != others[last].digest:
            yield group, True
        elif any(calls[number].has_parts or others[number].has_parts for number in common):
            yield group, False


def native_disagreement(own: RingReader, other: RingReader, depth: int) -> Iterable[tuple[str, int]]:
    """Yield the groups in which native code has recorded different calls of two ranks, and the first such number.

    Args:
        depth: so many of the latest records are compared. The engine compares calls itself when the next one comes, so
            those that differ are the last of their group.
    """
    mine, theirs = native_marks(own, depth), native_marks(other, depth)
    for group, calls in mine.items():
        others = theirs.get(group, {})
        number = min((one for one in calls.keys() & others.keys() if calls[one] != others[one]), default=0)
        if number:
            yield group, number


def complete_within_s(size: int) -> float:
    """Return the seconds that ranks have to come to a call that differs, so that all who differ are named.

    Args:
        size: of the group: many ranks often share few cores.
    """
    return min(_COMPLETE_S + _COMPLETE_S_OF_A_RANK * size, _MOST_COMPLETE_S)


def native_mismatch(group: RingGroup, rings: Mapping[int, RingReader], number: int) -> Finding | None:
    """Return how the calls of that number, which native code has recorded, differ; None where they do not.

    Args:
        rings: of the ranks that can be read, by global rank.
    """
    near = range(number, number + LOOK_AHEAD + 1)
    calls = {rank: calls_numbered(rings[rank], group.name, near, lane=1) for rank in group.ranks if rank in rings}
    return next(iter(collective_mismatches(group, calls)), None)


def neighbours(rank: int, groups: Iterable[RingGroup], here: Collection[int]) -> list[int]:
    """Return the ranks of this host before and after ``rank`` in its groups; all of them where they are few.

    Args:
        here: the other ranks of this host.
    """
    if len(here) <= _FEW_RANKS:
        return sorted(here)
    chosen: set[int] = set()
    for group in groups:
        members = [one for one in group.ranks if one in here or one == rank]
        if rank in members and len(members) > 1:
            at = members.index(rank)
            chosen |= {members[at - 1], members[(at + 1) % len(members)]}
    return sorted(chosen - {rank})


def first_difference(mine: Mapping[int, int], theirs: Mapping[int, int]) -> int | None:
    """Return the first number whose digests differ; None where none does.

    Args:
        mine, theirs: digests of two ranks' calls on one group, by number. Each covers the calls before it as well, so
            that all of them differ after the first.
    """
    common = sorted(mine.keys() & theirs.keys())
    at = bisect_left(common, True, key=lambda number: mine[number] != theirs[number])
    return common[at] if at < len(common) else None


def mismatch(group: RingGroup, rings: Mapping[int, RingReader], one: int, other: int) -> Finding | None:
    """Return how the calls of ranks ``one`` and ``other`` on a group differ, by their digests; None where they do not.

    Args:
        rings: of the ranks that can be read, by global rank. The calls of all of them are compared where these two
            part, which may be as long ago as their rings reach back.
    """
    mine, theirs = digests(rings[one], group.name), digests(rings[other], group.name)
    number = first_difference(mine, theirs)
    if number is None:
        return None
    near = range(number, number + LOOK_AHEAD + 1)
    calls = {rank: calls_numbered(rings[rank], group.name, near) for rank in group.ranks if rank in rings}
    found = collective_mismatches(group, calls)
    if found:
        return found[0]
    if number == 1 or (number - 1 in mine and number - 1 in theirs):
        return None
    # Two threads that count at once can leave different digests of the same calls.
    if any(rings[rank].word("threads") > 1 for rank in (one, other)):
        return None
    return differ_by(group, one, other, number)


def differ_by(group: RingGroup, one: int, other: int, number: int) -> Finding:
    """Return that two ranks have made different calls up to one of that number, where which is not known any more."""
    ranks = tuple(sorted((one, other)))
    text = (
        f"the calls of {rank_list(ranks)} differ at or before call {number} of {group}; the flight recorder does not "
        "have the first that differs any more"
    )
    return Finding(FindingKind.MISMATCH, group, ranks, text, number)
