"""Compare the messages of pairs of ranks: a ``send`` and a ``recv`` with one number, pair and tag belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.matching import at_caller
from comm_utils.flight_recorder.snapshot import RankSnapshot

__all__ = [
    "compare_messages",
    "crossed_tags",
    "describe_difference",
    "has_come",
    "received_from_any",
    "with_native_messages_numbered",
]

# Group, source, target and tag.
_Series = tuple[str, int, int, int]


def with_native_messages_numbered(known: Mapping[int, RankSnapshot]) -> dict[int, list[Call]]:
    """Return the calls of each rank with numbers for the messages of native code, which records none.

    Where a rank has overwritten some of its messages, how many there were is not known: of those with that rank, only
    the ones that have not ended well are kept, and are counted from 1.

    Args:
        known: snapshots by global rank, with all calls that the rings have.
    """
    wrapped = {
        rank for rank, one in known.items() if min((call.number for call in one.calls if call.is_native), default=1) > 1
    }
    return {rank: _numbered(rank, one, wrapped) for rank, one in known.items()}


def _numbered(rank: int, snapshot: RankSnapshot, wrapped: set[int]) -> list[Call]:
    last: dict[_Series, int] = defaultdict(int)
    found = []
    for call in sorted(snapshot.calls, key=lambda call: (call.lane, call.number)):
        if not call.is_native or not call.is_message:
            found.append(call)
        elif wrapped.isdisjoint((rank, call.peer)) or call.is_open or call.failed:
            source, target = (rank, call.peer) if call.is_send else (call.peer, rank)
            series = call.group.name, source, target, call.tag
            last[series] += 1
            found.append(replace(call, in_series=last[series]))
    return found


def received_from_any(group: RingGroup, known: Mapping[int, RankSnapshot]) -> set[tuple[int, int]]:
    """Return the receivers and tags with a ``recv`` from any rank, which takes messages that no number tells."""
    return {
        (rank, call.tag)
        for rank in group.ranks
        if rank in known
        for call in known[rank].calls
        if call.group.name == group.name and call.is_message and not call.is_send and call.peer < 0
    }


def compare_messages(group: RingGroup, here: Mapping[int, RankSnapshot]) -> tuple[str, tuple[int, ...], int]:
    """Return the first message whose receiver expects something else than was sent, both ranks and its number.

    The text is "" where there is none.
    """
    from_any = received_from_any(group, here)
    sent: dict[tuple[int, int, int, int], Call] = {}
    for rank, one in here.items():
        for call in one.calls:
            if call.group.name == group.name and call.is_send and call.in_series:
                sent[rank, call.peer, call.tag, call.in_series] = call
    for rank, one in here.items():
        for call in one.calls:
            if call.group.name != group.name or not call.is_message or call.is_send:
                continue
            if call.peer < 0 or not call.in_series or (rank, call.tag) in from_any:
                continue
            other = sent.get((call.peer, rank, call.tag, call.in_series))
            if other is not None and (other.dtype, other.elements) != (call.dtype, call.elements):
                return describe_difference(other, call), tuple(sorted((call.peer, rank))), call.in_series
    return "", (), 0


def describe_difference(sent: Call, received: Call) -> str:
    """Return how a message differs from what its receiver expects."""
    return (
        f"message {received.in_series} from rank {received.peer} to rank {sent.peer} on {received.group}: {sent}"
        f"{at_caller(sent.caller)}, but {received}{at_caller(received.caller)}"
    )


def has_come(
    group: RingGroup,
    rank: int,
    call: Call,
    known: Mapping[int, RankSnapshot],
    from_any: Callable[[], Container[tuple[int, int]]],
) -> bool:
    """Return whether the peer has begun, or may have begun, what belongs to a message of ``rank``.

    Args:
        from_any: returns :func:`received_from_any`.
    """
    peer = known.get(call.peer)
    if peer is None:
        return False
    theirs = [
        other
        for other in peer.calls
        if other.is_message
        and other.is_send != call.is_send
        and (other.group.name, other.tag) == (group.name, call.tag)
        and other.peer in (rank, -1)
    ]
    receiver = call.peer if call.is_send else rank
    numbers = [other.in_series for other in theirs if other.peer == rank]
    if (receiver, call.tag) not in from_any():
        return bool(numbers) and (max(numbers) >= call.in_series or 0 in numbers)  # 0: they are not counted
    # How many messages of this pair went to those calls is not known.
    if peer.is_gone:
        return False
    return any(other.is_open for other in theirs) if call.is_send else call.in_series <= max(numbers, default=0)


def crossed_tags(
    group: RingGroup,
    waiting: Mapping[int, Call],
    known: Mapping[int, RankSnapshot],
    from_any: Callable[[], Container[tuple[int, int]]],
) -> list[tuple[int, int, str]]:
    """Return senders and receivers that wait for each other with different tags, and a sentence about each pair.

    Args:
        waiting: by rank, the call of the group in which it waits.
        from_any: as for :func:`has_come`.
    """
    found = []
    for rank, call in sorted(waiting.items()):
        theirs = waiting.get(call.peer)
        if not call.is_send or theirs is None or not theirs.is_message or theirs.is_send or theirs.peer != rank:
            continue
        peer = call.peer
        if theirs.tag == call.tag or has_come(group, rank, call, known, from_any):
            continue
        if has_come(group, peer, theirs, known, from_any):
            continue
        text = (
            f"rank {rank} ({known[rank].where}) sends with tag {call.tag}{at_caller(call.caller)}, and rank {peer} "
            f"({known[peer].where}) receives with tag {theirs.tag}{at_caller(theirs.caller)}, on {group}: they "
            "wait for each other, as their tags or the order of their messages differ"
        )
        found.append((rank, peer, text))
    return found
