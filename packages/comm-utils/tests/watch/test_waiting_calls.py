"""Whom a call that waits names where ranks have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comm_utils.errors import CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch import waiting_calls
from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.waiting_calls import WaitingCalls
from comm_utils.watch.world_view import WorldView


def _ended(ring: Ring) -> RankSnapshot:
    return replace(take_snapshot(ring.reader), process="ended")


def _failed(ring: Ring, cause: int) -> Ring:
    """Let a call of the ring's rank fail because of another rank."""
    ring.recorder.kind(ring.group(), "all_reduce", "all_reduce", "float32", "sum").fail(ring.begin())
    ring.recorder.failure("world", "PeerLostError", f"rank {cause} has ended", (cause,))
    return ring


def _found(own: Ring, others: dict[int, RankSnapshot], monkeypatch: pytest.MonkeyPatch) -> Trouble:
    """Return the trouble of the call that rank 0 makes."""
    monkeypatch.setattr(waiting_calls, "_YOUNGEST_S", 0.0)
    monkeypatch.setattr(waiting_calls, "_GRACE_S", 0.0)
    own.begin()
    known = {0: take_snapshot(own.reader), **others}
    view = WorldView(0, len(own.ranks), own.reader)
    monkeypatch.setattr(view, "snapshots", lambda: known)
    monkeypatch.setattr(view.local, "state_of", lambda rank: known[rank].process if rank in known else "unknown")
    ((group, trouble),) = WaitingCalls(view, {}, WatchSettings(mismatch="off")).look(known[0].calls)
    assert group == "world"
    return trouble


def test_the_rank_that_ended_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Ring(3, world_size=4)
    killed.begin()
    others = {1: _ended(_failed(Ring(1, world_size=4), 3)), 3: _ended(killed)}
    trouble = _found(Ring(0, world_size=4), others, monkeypatch)
    assert trouble.kind is PeerLostError
    assert trouble.ranks == (3,)
    assert trouble.text.startswith("rank 3 (")


def test_the_rank_that_one_that_ended_had_named_is_where_it_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {1: _ended(_failed(Ring(1, world_size=4), 3))}
    trouble = _found(Ring(0, world_size=4), others, monkeypatch)
    assert trouble == Trouble(PeerLostError, "rank 3 has ended", (3,))


def test_a_call_that_its_library_does_not_end_at_the_timeout_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_calls, "_LATE_S", 0.0)
    own = Ring(0, world_size=2)
    own.recorder.group_index("world", own.ranks, "world", "gloo", 1.5)
    own.begin(call="all_reduce")
    view = WorldView(0, 2, own.reader)
    monkeypatch.setattr(view, "snapshots", lambda: {0: take_snapshot(own.reader)})
    looks = WaitingCalls(view, {}, WatchSettings(mismatch="off"))
    (call,) = take_snapshot(own.reader).calls
    assert list(looks.look([call])) == []
    late = replace(call, begin_ns=call.begin_ns - 10**10)
    ((group, trouble),) = looks.look([late])
    assert (group, trouble.kind) == ("world", CommTimeoutError)
    assert "has taken 10 s, although the timeout of the group of ranks [0, 1] (world) is 1.5 s" in trouble.text
    assert list(looks.look([replace(late, is_limited=True)])) == []  # by a timeout of its own
    own.call()  # its time began when an earlier call of the group ended
    assert list(looks.look([late])) == []


def test_the_time_of_a_message_begins_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_calls, "_LATE_S", 0.0)
    own = Ring(0, world_size=2)
    own.recorder.group_index("world", own.ranks, "world", "gloo", 1.5)
    own.begin("recv", peer=1)
    view = WorldView(0, 2, own.reader)
    monkeypatch.setattr(view, "snapshots", lambda: {0: take_snapshot(own.reader)})
    looks = WaitingCalls(view, {}, WatchSettings(mismatch="off"))
    (call,) = take_snapshot(own.reader).calls
    late = replace(call, begin_ns=call.begin_ns - 10**10)  # of an irecv whose handle was waited for just now
    assert list(looks.look([late])) == []
    monkeypatch.setattr(waiting_calls, "_LATE_S", -1.5)
    ((group, trouble),) = looks.look([late])
    assert (group, trouble.kind) == ("world", CommTimeoutError)
    assert trouble.text.startswith("recv has taken 0 s, although the timeout of ")
