"""Calls that a device has not completed: one of a group tells why, and the host may be anywhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import FindingKind, describe_rank
from comm_utils.flight_recorder.layout import IN_BACKGROUND, ON_DEVICE
from comm_utils.flight_recorder.snapshot import RankSnapshot, decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch import waiting_calls
from comm_utils.watch.explanation import until_failed_call
from comm_utils.watch.open_calls import OpenCalls
from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.waiting_calls import WaitingCalls
from comm_utils.watch.world_view import WorldView


def queued(rank: int, calls: int) -> Ring:
    """A rank whose device has completed two of so many calls."""
    ring = Ring(rank, world_size=3)
    ring.call(times=2)
    for _ in range(calls - 2):
        ring.begin(state=ON_DEVICE)
    return ring


def test_one_call_of_a_group_waits() -> None:
    ring = queued(0, 400)
    ring.begin(state=IN_BACKGROUND)
    snapshot = take_snapshot(ring.reader)
    (call,) = snapshot.waiting_calls()
    assert call.number == 3
    assert call.is_open
    assert call.is_on_device
    assert not call.is_limited
    assert [one.number for one in OpenCalls(ring.reader).look()] == [3]
    (call,) = decode_snapshot(encode_snapshot(snapshot)).waiting_calls()
    assert call.is_on_device


def test_the_rank_that_is_missing_is_named_and_no_other_that_waits() -> None:
    rings = {rank: queued(rank, calls) for rank, calls in enumerate((50, 40, 2))}
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    (group,) = {call.group for one in known.values() for call in one.calls}
    (finding,) = diagnose_group(known, group)
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING, (2,))


def test_the_rank_that_is_missing_is_named_where_the_first_open_call_may_have_ended() -> None:
    """Calls share an event: those before the one that the device waits for stay open with it."""
    rings = {rank: queued(rank, calls) for rank, calls in enumerate((20, 15, 11))}
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    (group,) = {call.group for one in known.values() for call in one.calls}
    found = diagnose_group(known, group)
    assert [(one.kind, one.ranks, one.number) for one in found] == [(FindingKind.MISSING, (2,), 12)]
    assert until_failed_call(found, known[0], group) == found
    every = dict.fromkeys(range(3), known[0])
    assert diagnose_group(every, group) == []


def test_what_else_the_device_may_wait_for_is_said() -> None:
    """It may not complete the first call for a reason of its own."""
    rings = {rank: queued(rank, calls) for rank, calls in enumerate((90, 80, 40))}
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    (group,) = {call.group for one in known.values() for call in one.calls}
    (finding,) = diagnose_group(known, group)
    assert (finding.ranks, finding.number) == ((2,), 41)
    assert finding.text.endswith("(the device of rank 0 may be in one of the 38 calls before, which all have made)")


def test_messages_on_a_device_have_numbers_of_their_own() -> None:
    def waiting_for_message(*more: str) -> tuple[Mapping[int, RankSnapshot], RingGroup]:
        rings = {rank: Ring(rank, world_size=2) for rank in (0, 1)}
        for ring in rings.values():
            ring.call()
        rings[0].call("recv", times=5, peer=1)
        rings[1].call("send", times=5, peer=0)
        ring = rings[0]
        ring.begin("recv", state=ON_DEVICE, peer=1)
        for name in more:
            ring.begin(name, state=ON_DEVICE)
        known = {rank: take_snapshot(one.reader) for rank, one in rings.items()}
        return known, next(call.group for call in known[0].calls)

    for more in ((), ("all_reduce",)):
        known, group = waiting_for_message(*more)
        found = diagnose_group(known, group)
        assert [(one.kind, one.ranks) for one in found][:1] == [(FindingKind.MISSING, (1,))], more
        assert until_failed_call(found, known[0], group) == found


def test_a_call_of_the_host_behind_calls_on_the_device_may_be_the_one_that_failed() -> None:
    rings = {rank: queued(rank, 5) for rank in range(3)}
    rings[0].begin()
    rings[2].begin()
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    (group,) = {call.group for one in known.values() for call in one.calls}
    found = [one for one in diagnose_group(known, group) if one.ranks == (1,)]
    assert [one.number for one in found] == [6]
    assert until_failed_call(found, known[0], group) == found


def test_the_host_of_a_rank_with_calls_on_its_device_is_not_in_them() -> None:
    ring = queued(0, 9)
    ring.recorder.memory.set_stack("train.py:12 main\ndata.py:34 load")
    text = describe_rank(take_snapshot(ring.reader))
    assert text.startswith("has all_reduce(")
    assert " on its device since " in text
    assert text.endswith(", and its host goes on at data.py:34 load")


def test_hosts_that_go_on_do_not_wait_for_each_other_in_two_groups() -> None:
    def known(state: int) -> Mapping[int, RankSnapshot]:
        rings = {rank: Ring(rank, world_size=2) for rank in (0, 1)}
        for rank, ring in rings.items():
            for name in ("world", "other") if rank == 0 else ("other", "world"):
                ring.group(name)
        for rank, name in ((0, "world"), (1, "other")):
            kind = rings[rank].recorder.kind(rings[rank].group(name), "all_reduce", "all_reduce", "float32", "sum")
            kind.begin(10, 0, None, None, state)
        return {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}

    def kinds(state: int) -> set[FindingKind]:
        snapshots = known(state)
        groups = {call.group for one in snapshots.values() for call in one.calls}
        return {one.kind for group in groups for one in diagnose_group(snapshots, group)}

    assert FindingKind.ORDER in kinds(0)
    assert FindingKind.ORDER not in kinds(ON_DEVICE)


def test_a_look_takes_one_snapshot_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = queued(0, 300)
    view = WorldView(0, 3, ring.reader)
    taken: list[int] = []
    snapshots = view.snapshots

    def count() -> Mapping[int, RankSnapshot]:
        taken.append(1)
        return snapshots()

    monkeypatch.setattr(view, "snapshots", count)
    monkeypatch.setattr(view, "ask", lambda *_: {})
    monkeypatch.setattr(waiting_calls, "_YOUNGEST_S", 0.0)
    monkeypatch.setattr(waiting_calls, "_FIRST_LOOK_S", 0.0)
    looks, opened = WaitingCalls(view, {}, WatchSettings(warn_after_s=1e-9)), OpenCalls(ring.reader)
    with caplog.at_level(logging.WARNING, "comm"):
        for _ in range(3):
            list(looks.look(opened.look()))
    assert len([one for one in caplog.records if "so far" in one.getMessage()]) == 1
    assert len(taken) <= 4
