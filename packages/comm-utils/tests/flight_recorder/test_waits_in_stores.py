"""Of a monitored barrier, the rank that comes last records nothing, so that numbers of calls do not belong together."""

from __future__ import annotations

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.layout import LIMITED
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring

NAME = "world (monitored barrier)"


def missing(*rings: Ring) -> list[tuple[int, ...]]:
    known = {rank: take_snapshot(ring.reader) for rank, ring in enumerate(rings)}
    return [one.ranks for one in diagnose_group(known, RingGroup(NAME, (0, 1, 2)))]


def wait(ring: Ring) -> int:
    return ring.begin("barrier", group=NAME, call="monitored_barrier", state=LIMITED)


def test_a_rank_in_a_monitored_barrier_is_not_missing_there() -> None:
    rings = [Ring(rank, world_size=3) for rank in range(3)]
    for last in (0, 0, 1):
        waiting = {rank: wait(ring) for rank, ring in enumerate(rings) if rank != last}
        for rank, number in waiting.items():
            rings[rank].end(number)
    wait(rings[0])
    wait(rings[1])
    assert missing(*rings) == [(2,)]
    wait(rings[2])
    assert missing(*rings) == []


def test_a_rank_that_waited_in_more_barriers_than_the_others_is_missing() -> None:
    rings = [Ring(rank, world_size=3) for rank in range(3)]
    for _ in range(3):
        rings[2].end(wait(rings[2]))
    wait(rings[0])
    wait(rings[1])
    assert missing(*rings) == [(2,)]
