"""A receive from any rank takes a message that no number tells."""

from __future__ import annotations

import pytest

from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring


def findings(receiver: Ring, sender: Ring) -> list[Finding]:
    known = {rank: take_snapshot(ring.reader) for rank, ring in enumerate((receiver, sender))}
    return diagnose_group(known, next(iter(receiver.reader.groups.values())))


@pytest.fixture
def rings() -> tuple[Ring, Ring]:
    """Rank 0 has received from any rank what rank 1 sent first."""
    receiver, sender = Ring(0), Ring(1)
    sender.call("send", 10, peer=0)
    receiver.call("recv", 10, peer=-1)
    return receiver, sender


def test_later_messages_are_no_mismatch(rings: tuple[Ring, Ring]) -> None:
    receiver, sender = rings
    sender.call("send", 20, peer=0)
    receiver.call("recv", 20, peer=1)
    assert findings(receiver, sender) == []


def test_a_mismatch_on_another_tag_is_found(rings: tuple[Ring, Ring]) -> None:
    receiver, sender = rings
    sender.call("send", 20, peer=0, tag=5)
    receiver.call("recv", 30, peer=1, tag=5)
    assert [one.kind for one in findings(receiver, sender)] == [FindingKind.MISMATCH]


def test_who_is_awaited(rings: tuple[Ring, Ring]) -> None:
    receiver, sender = rings
    sending = sender.begin("send", 20, peer=0)
    assert [(one.kind, one.ranks) for one in findings(receiver, sender)] == [(FindingKind.MISSING, (0,))]
    receiving = receiver.begin("recv", 20, peer=1)
    assert findings(receiver, sender) == []
    for ring, number in ((receiver, receiving), (sender, sending)):
        ring.end(number)
    receiver.begin("recv", 20, peer=1)
    assert findings(receiver, sender) == []
    receiver.begin("recv", 20, peer=1)
    (missing,) = findings(receiver, sender)
    assert (missing.kind, missing.ranks) == (FindingKind.MISSING, (1,))
