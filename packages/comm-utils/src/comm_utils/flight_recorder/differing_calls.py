"""The first collective of a group in which the calls of its ranks differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.matching import agreed, by_kind, compare_calls, compare_parts, rank_list
from comm_utils.flight_recorder.snapshot import RankSnapshot

__all__ = ["LOOK_AHEAD", "collective_mismatches", "collectives_of", "mismatches_of"]

#: Calls that are taken together with the one where the ranks part, to see whether one was left out.
LOOK_AHEAD = 3


def collectives_of(known: Mapping[int, RankSnapshot], group: RingGroup) -> dict[int, dict[int, Call]]:
    """Return the collectives of a group by global rank, of those that are known, and by number in the group."""
    return {
        rank: {call.in_series: call for call in known[rank].collectives(group.name)}
        for rank in group.ranks
        if rank in known
    }


def mismatches_of(known: Mapping[int, RankSnapshot], group: RingGroup) -> list[Finding]:
    """Return the first collective of a group in which its ranks differ.

    Args:
        known: snapshots by global rank; ranks may be missing.
    """
    return collective_mismatches(group, collectives_of(known, group))


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
