"""Calls as torch's ``fr_trace`` can match them: in groups of which all ranks make the same calls, by number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from comm_utils import operations
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.layout import LANES
from comm_utils.flight_recorder.matching import agreed
from comm_utils.flight_recorder.message_matching import with_native_messages_numbered
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.operations import patterns
from comm_utils.operations.table import ROWS
from comm_utils.operations.types import Pattern

__all__ = ["COLLECTIVES", "Placed", "described", "place"]

# What torch's flight recorder calls a pattern otherwise.
_NAMES = {patterns.ALL_GATHER: "_all_gather_base", patterns.REDUCE_SCATTER: "_reduce_scatter_base"}

#: torch's name for a collective, and whether its input, and its output, has a part for each rank.
COLLECTIVES: dict[Pattern, tuple[str, bool, bool]] = {
    pattern: (
        _NAMES.get(pattern, pattern.name),
        pattern.has_parts and not pattern.input_is_part,
        pattern.has_parts and not pattern.output_is_part,
    )
    for pattern in dict.fromkeys(row.pattern for row in ROWS)
    if not pattern.is_message
}


@dataclass(frozen=True)
class Placed:
    """A call in the group and under the number by which fr_trace matches it."""

    call: Call
    group: RingGroup
    name: str


def place(known: Mapping[int, RankSnapshot]) -> dict[int, list[Placed]]:
    """Return the calls of each rank that fr_trace can match, by global rank.

    The ranks are looked at together: calls that a rank has already overwritten, or that its ring cannot show, are left
    out on the others, too, because fr_trace would call that rank missing.
    """
    placed = {rank: _placed(rank, calls) for rank, calls in with_native_messages_numbered(known).items()}
    _separate_lanes(placed)
    _leave_out_overwritten(known, placed)
    _leave_out_one_sided_messages(known, placed)
    _leave_out_ended(known, placed)
    return placed


def described(group: RingGroup) -> str:
    return f"{group.description or 'group'} ({group.backend})" if group.backend else group.description or "group"


def _placed(rank: int, calls: Iterable[Call]) -> list[Placed]:
    found = []
    for call in calls:
        one = _message(rank, call) if call.is_message else _collective(call)
        if one is not None:
            found.append(one)
    return found


def _collective(call: Call) -> Placed | None:
    row = operations.find(call.operation)
    known = None if row is None else COLLECTIVES.get(row.pattern)
    if known is None or not call.group.ranks or call.in_series < 1:
        return None
    return Placed(call, call.group, f"gloo:{known[0]}")


def _message(rank: int, call: Call) -> Placed | None:
    source, target = (rank, call.peer) if call.is_send else (call.peer, rank)
    if call.peer < 0 or source == target or call.in_series < 1 or not {source, target} <= set(call.group.ranks):
        return None
    pair = tuple(sorted((source, target)))
    name = f"{call.group.name} from {source} to {target} tag {call.tag}"
    group = RingGroup(name, pair, f"messages on {described(call.group)}", call.group.backend)
    arrow = "{0}->{1}" if call.is_send else "{1}<-{0}"
    word = "send" if call.is_send else "recv"
    return Placed(call, group, f"gloo:{word} {arrow.format(pair.index(source), pair.index(target))}")


def _separate_lanes(placed: dict[int, list[Placed]]) -> None:
    """Give calls of native code a group of their own where Python records calls on the same group, too."""
    lanes: dict[str, set[int]] = defaultdict(set)
    for calls in placed.values():
        for one in calls:
            lanes[one.group.name].add(one.call.lane)
    for rank, calls in placed.items():
        placed[rank] = [
            replace(one, group=replace(one.group, name=f"{one.group.name} (native)"))
            if one.call.lane and len(lanes[one.group.name]) > 1
            else one
            for one in calls
        ]


def _leave_out_overwritten(known: Mapping[int, RankSnapshot], placed: dict[int, list[Placed]]) -> None:
    """Leave out calls of which another rank may have overwritten its own."""
    first: dict[str, int] = defaultdict(int)
    only_open: set[str] = set()
    groups = {one.group.name: one.group for calls in placed.values() for one in calls}
    wrapped = {rank for rank, one in known.items() if any(_first_number(one, lane) > 1 for lane in range(LANES))}
    for rank in wrapped:
        kept: dict[str, int] = {}
        for one in placed[rank]:
            kept[one.group.name] = min(one.call.in_series, kept.get(one.group.name, one.call.in_series))
        for name, number in kept.items():
            first[name] = max(first[name], number)
        # What has ended in a group of which a rank keeps nothing, that rank has taken part in.
        only_open |= {name for name, group in groups.items() if rank in group.ranks and name not in kept}
    for rank, calls in placed.items():
        placed[rank] = [
            one
            for one in calls
            if one.call.in_series >= first[one.group.name]
            and (one.group.name not in only_open or one.call.is_open or one.call.failed)
        ]


def _first_number(snapshot: RankSnapshot, lane: int) -> int:
    return min((call.number for call in snapshot.calls if call.lane == lane), default=0)


def _leave_out_one_sided_messages(known: Mapping[int, RankSnapshot], placed: dict[int, list[Placed]]) -> None:
    """Leave out messages to a ``recv`` from any rank, and those that left without it."""
    from_any = {
        (call.group.name, rank, call.tag)
        for rank, one in known.items()
        for call in one.calls
        if call.is_message and not call.is_send and call.peer < 0
    }
    received = {
        (one.group.name, one.call.in_series)
        for calls in placed.values()
        for one in calls
        if one.call.is_message and not one.call.is_send
    }

    def counts(rank: int, one: Placed) -> bool:
        call = one.call
        if not call.is_message:
            return True
        target = call.peer if call.is_send else rank
        if (call.group.name, target, call.tag) in from_any:
            return False
        has_left = call.is_send and not call.is_open and not call.failed
        return not has_left or (one.group.name, call.in_series) in received or target not in known

    for rank, calls in placed.items():
        placed[rank] = [one for one in calls if counts(rank, one)]


def _leave_out_ended(known: Mapping[int, RankSnapshot], placed: dict[int, list[Placed]]) -> None:
    """Leave out the calls in the course of which a process ended, unless the others' calls differ from them."""
    lost = {rank for rank, one in known.items() if one.is_lost and not one.failures}
    others: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for rank, calls in placed.items():
        if rank not in lost:
            for one in calls:
                others[one.group.name, one.call.in_series].append(one.call)

    def is_hidden(one: Placed) -> bool:
        same = others[one.group.name, one.call.in_series]
        if not one.call.is_open or not same:
            return False
        return one.call.is_message or all(agreed(call) == agreed(one.call) for call in same)

    for rank in lost:
        placed[rank] = [one for one in placed[rank] if not is_hidden(one)]
