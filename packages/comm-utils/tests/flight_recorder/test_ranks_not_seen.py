"""Ranks of which no snapshot is there."""

from __future__ import annotations

from comm_utils.flight_recorder import FlightRecorder, RingReader
from comm_utils.flight_recorder.diagnosis import diagnose
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot

OTHERS = "ranks 0, 2, 3, 4, 5, 6, 7, 8 and 65527 more may not have called all_reduce, for which rank 1 waits"


def in_all_reduce(size: int) -> RankSnapshot:
    """Rank 1, which waits in an all_reduce of so many ranks."""
    memory = RingMemory(16, 1, size)
    recorder = FlightRecorder()
    recorder._use(memory)
    group = recorder.group_index("world", tuple(range(size)), "of all", "gloo")
    recorder.kind(group, "all_reduce", "all_reduce", "float32", "sum").begin(5, 0)
    return take_snapshot(RingReader(bytes(memory.memory)), is_local=False)


def test_they_are_in_one_finding_however_many_they_are() -> None:
    (finding,) = diagnose([in_all_reduce(1 << 16)])
    assert finding.kind is FindingKind.MISSING
    assert finding.text == f"{OTHERS}: they are not seen from here"
    assert finding.ranks == (0, *range(2, 1 << 16))


def test_a_single_one() -> None:
    (finding,) = diagnose([in_all_reduce(2)])
    assert finding.text == "rank 0 may not have called all_reduce, for which rank 1 waits: it is not seen from here"
