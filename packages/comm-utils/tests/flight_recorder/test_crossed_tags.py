"""Ranks that wait for each other's message with different tags have both made their calls."""

from __future__ import annotations

from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring


def findings(*rings: Ring) -> list[Finding]:
    known = {rank: take_snapshot(ring.reader) for rank, ring in enumerate(rings)}
    return diagnose_group(known, next(iter(rings[0].reader.groups.values())))


def test_both_tags_are_named() -> None:
    sender, receiver = Ring(0), Ring(1)
    sender.begin("send", 10, peer=1, tag=0)
    receiver.begin("recv", 10, peer=0, tag=2)
    (found,) = findings(sender, receiver)
    assert (found.kind, found.ranks) == (FindingKind.MISSING, (0, 1))
    assert "sends with tag 0" in found.text
    assert "receives with tag 2" in found.text
    assert "has not called" not in found.text


def test_a_rank_that_waits_for_one_of_them_is_told_of_that_one() -> None:
    sender, receiver, third = (Ring(rank, world_size=3) for rank in range(3))
    sender.begin("send", 10, peer=1, tag=0)
    receiver.begin("recv", 10, peer=0, tag=2)
    third.begin("recv", 10, peer=1)
    first, second = findings(sender, receiver, third)
    assert (first.ranks, second.ranks) == ((0, 1), (1,))
    assert "has not called send, for which rank 2 waits" in second.text


def test_a_message_under_way_is_not_crossed() -> None:
    """The receiver takes what was sent before in the background, and the sender waits for its next receive."""
    sender, receiver = Ring(0), Ring(1)
    sender.begin("send", 10, peer=1, tag=2, state=IN_BACKGROUND)
    sender.begin("send", 10, peer=1, tag=0)
    receiver.begin("recv", 10, peer=0, tag=2)
    (found,) = findings(sender, receiver)
    assert found.ranks == (1,)
    assert "has not called recv" in found.text
