"""Compares the messages between this rank and others of its host while they are sent and received.

A ``send`` and the ``recv`` that takes it have one number in the series of their group, pair and tag, and each record
has a digest of the messages before it in its series: so one comparison covers all of them.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.message_matching import describe_difference
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.scanning import MessageMark, MessageSeries, messages, receives_from_any
from comm_utils.watch.comparison import first_difference
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView

__all__ = ["MessageComparison"]

# So many other ranks, and of each so many of its newest records, are looked at in one look.
_PEERS_AT_ONCE, _DEPTH = 4, 512
# A message that is moving may end in so long. Where its connection is shut down meanwhile, gloo can miss that, and the
# call waits for its timeout.
_MOVES_NS = 400_000_000


class _Difference(NamedTuple):
    """A message that differs, and whether it may be moving now."""

    finding: Finding
    may_move: bool


class MessageComparison:
    """Compares the digests of messages as long as there are new ones.

    Args:
        broken: the groups that are in trouble already.
    """

    def __init__(self, view: WorldView, own: RingReader, broken: Container[str]) -> None:
        self._view, self._own, self._broken = view, own, broken
        # By rank, how many calls both rings had when they were compared.
        self._compared: dict[int, tuple[int, int]] = {}
        # How many kinds of calls there were, and the peers of those that are messages; the next one comes first.
        self._peers: tuple[int, list[int]] = 0, []

    def look(self, everything: bool = False) -> Iterator[tuple[str, Trouble]]:
        """Yield the groups in which this rank and another of this host send and receive different messages.

        Args:
            everything: compare with all ranks, and as far back as the rings reach.
        """
        readers, count, left = self._view.local.readers, self._own.count(0), _PEERS_AT_ONCE
        mine: Mapping[MessageSeries, Mapping[int, MessageMark]] | None = None
        most = None if everything else _DEPTH
        for rank in self._in_turn():
            reader = readers.get(rank)
            if reader is None or not (everything or left):
                continue
            counts = count, reader.count(0)
            if self._compared.get(rank) == counts and not everything:
                continue
            left -= 1
            reader.refresh()
            mine = messages(self._own, most) if mine is None else mine
            theirs = messages(reader, most)
            is_early = False
            for series in sorted(mine.keys() & theirs.keys()):
                if series.group not in self._broken and _disagree(mine[series], theirs[series]):
                    found = self._difference(series, rank, reader)
                    if found is not None and found.may_move and not everything:
                        is_early = True
                    elif found is not None:
                        yield series.group, Trouble.of(found.finding)
            if not is_early:
                self._compared[rank] = counts

    def _in_turn(self) -> list[int]:
        """Return the ranks with which this one has exchanged messages, those first that had no turn for longest."""
        known, peers = self._peers
        kinds = self._own.kinds
        if len(kinds) != known:
            named = {one["peer"] for one in list(kinds.values()) if one["is_message"] and one["peer"] >= 0}
            peers = [*peers, *sorted(named - set(peers))]
        turned = peers[_PEERS_AT_ONCE:] + peers[:_PEERS_AT_ONCE]
        self._peers = len(kinds), turned
        return turned

    def _difference(self, series: MessageSeries, other: int, reader: RingReader) -> _Difference | None:
        """Return the first message that differs; None where that is not certain."""
        rings = {self._view.rank: self._own, other: reader}
        if receives_from_any(rings[series.receiver], series.group):
            return None
        sent, received = (messages(rings[rank]).get(series, {}) for rank in (series.sender, series.receiver))
        number = first_difference(_digests(sent), _digests(received))
        if number is None:
            return None
        sending = rings[series.sender].call(0, sent[number].number)
        receiving = rings[series.receiver].call(0, received[number].number)
        if sending is None or receiving is None:
            return None
        ranks = tuple(sorted((series.sender, series.receiver)))
        group: RingGroup = receiving.group
        if (sending.dtype, sending.elements) != (receiving.dtype, receiving.elements):
            text = describe_difference(sending, receiving)
            begin_ns = max(sending.begin_ns, receiving.begin_ns)
            is_young = time.perf_counter_ns() - begin_ns < _MOVES_NS
            may_move = is_young and (sending.is_open or receiving.is_open)
            return _Difference(Finding(FindingKind.MISMATCH, group, ranks, text, number), may_move)
        # Two threads that count at once can leave different digests of the same messages.
        if number == 1 or (number - 1 in sent and number - 1 in received) or _has_threads(rings.values()):
            return None
        text = (
            f"the messages from rank {series.sender} to rank {series.receiver} with tag {series.tag} on {group} differ "
            f"at or before message {number}; the flight recorder does not have the first that differs any more"
        )
        return _Difference(Finding(FindingKind.MISMATCH, group, ranks, text, number), may_move=False)


def _disagree(mine: Mapping[int, MessageMark], theirs: Mapping[int, MessageMark]) -> bool:
    common = mine.keys() & theirs.keys()
    last = max(common, default=None)
    return last is not None and mine[last].digest != theirs[last].digest


def _digests(marks: Mapping[int, MessageMark]) -> dict[int, int]:
    return {number: mark.digest for number, mark in marks.items()}


def _has_threads(rings: Iterable[RingReader]) -> bool:
    return any(ring.word("threads") > 1 for ring in rings)
