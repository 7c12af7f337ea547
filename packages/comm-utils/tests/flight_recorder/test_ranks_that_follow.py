"""Of ranks that go one after the other, the first one is the cause."""

from __future__ import annotations

import signal
from dataclasses import replace

from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.testing.ring import Ring


def left(ring: Ring) -> RankSnapshot:
    ring.recorder.memory.set_word("state", 1)
    snapshot = take_snapshot(ring.reader)
    assert snapshot.process == "left"
    return snapshot


def begun(ring: Ring) -> Ring:
    ring.begin()
    return ring


def lost(ring: Ring) -> RankSnapshot:
    return replace(take_snapshot(ring.reader), process="ended")


def terminated(ring: Ring) -> RankSnapshot:
    snapshot = take_snapshot(ring.reader)
    return replace(snapshot, process="ended", header=replace(snapshot.header, signal=int(signal.SIGTERM)))


def failed(ring: Ring, *causes: int) -> Ring:
    """Let a call of the ring's rank fail because of other ranks."""
    kind = ring.recorder.kind(ring.group(), "all_reduce", "all_reduce", "float32", "sum")
    kind.fail(ring.begin())
    ring.recorder.failure("world", "PeerLostError", "it has gone", causes)
    return ring


def waiting(ring: Ring) -> RankSnapshot:
    ring.begin()
    return take_snapshot(ring.reader)


def ring(rank: int) -> Ring:
    made = Ring(rank, world_size=3)
    made.call("barrier")
    return made


def found(known: dict[int, RankSnapshot]) -> list[tuple[FindingKind, tuple[int, ...]]]:
    (group,) = {call.group for one in known.values() for call in one.calls}
    return [(one.kind, one.ranks) for one in diagnose_group(known, group)]


def test_a_rank_has_ended_by_a_signal_only_when_its_process_has() -> None:
    ended = terminated(ring(0))
    assert ended.end == "has ended by SIGTERM"
    assert replace(ended, process="running").end == "was sent SIGTERM"
    assert replace(ended, process="unknown").end == "was sent SIGTERM"


def test_a_rank_that_left_because_another_one_had_left_is_not_the_cause() -> None:
    known = {0: left(failed(ring(0), 1)), 1: left(ring(1)), 2: waiting(ring(2))}
    assert found(known) == [(FindingKind.LOST, (1,))]


def test_a_rank_that_ended_without_an_exit_because_another_one_had_is_not_the_cause() -> None:
    known = {0: lost(failed(ring(0), 2)), 1: waiting(ring(1)), 2: lost(begun(ring(2)))}
    assert found(known) == [(FindingKind.LOST, (2,))]


def test_of_ranks_that_have_ended_those_that_noted_no_failure_come_first() -> None:
    known = {0: lost(failed(ring(0))), 1: waiting(ring(1)), 2: lost(begun(ring(2)))}
    assert found(known) == [(FindingKind.LOST, (2,)), (FindingKind.LOST, (0,))]


def test_a_rank_that_failed_by_itself_is_the_cause() -> None:
    known = {0: left(failed(ring(0))), 1: waiting(ring(1)), 2: waiting(ring(2))}
    assert found(known) == [(FindingKind.LOST, (0,))]


def test_of_ranks_that_name_each_other_both_are() -> None:
    known = {0: left(failed(ring(0), 1)), 1: left(failed(ring(1), 0)), 2: waiting(ring(2))}
    assert found(known) == [(FindingKind.LOST, (0,)), (FindingKind.LOST, (1,))]


def test_a_rank_that_was_ended_by_a_signal_is_the_cause_where_nobody_else_failed() -> None:
    ended = ring(0)
    ended.begin()
    known = {0: terminated(ended), 1: take_snapshot(ring(1).reader), 2: waiting(ring(2))}
    assert found(known)[0] == (FindingKind.LOST, (0,))
    known[2] = waiting(failed(ring(2), 0))
    assert found(known)[0] == (FindingKind.LOST, (0,))
    known[2] = left(failed(ring(2), 0))
    known[1] = waiting(ring(1))
    assert found(known)[0] == (FindingKind.LOST, (0,))
    assert (FindingKind.LOST, (2,)) not in found(known)


def test_a_rank_that_a_launcher_ended_after_another_had_failed_is_not() -> None:
    ended = ring(0)
    ended.begin()
    known = {0: terminated(ended), 1: left(ring(1)), 2: waiting(ring(2))}
    assert (FindingKind.LOST, (1,)) in found(known)
    assert (FindingKind.LOST, (0,)) not in found(known)
