"""Ranks that make a group one after the other do not use their groups in different orders."""

from __future__ import annotations

from comm_utils.flight_recorder.diagnosis import diagnose
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring


def orders(*rings: Ring) -> list[tuple[int, ...]]:
    found = diagnose([take_snapshot(ring.reader) for ring in rings])
    return [one.ranks for one in found if one.kind is FindingKind.ORDER]


def test_a_rank_that_calls_on_a_group_has_made_it() -> None:
    slow, fast = Ring(0), Ring(1)
    slow.begin("barrier", group="pair (making)", call="new_group")
    fast.begin(group="pair")
    assert orders(slow, fast) == []


def test_a_rank_that_has_made_a_group_may_wait_in_another_one() -> None:
    slow, fast = Ring(0), Ring(1)
    slow.begin("barrier", group="pair (making)", call="new_group")
    fast.call("barrier", group="pair (making)", call="new_group")
    fast.begin()
    assert orders(slow, fast) == []


def test_a_rank_that_makes_a_group_while_the_other_calls_on_another_one_waits_in_vain() -> None:
    makes, calls = Ring(0), Ring(1)
    makes.begin("barrier", group="pair (making)", call="new_group")
    calls.begin()
    assert set(orders(makes, calls)) == {(0, 1)}
