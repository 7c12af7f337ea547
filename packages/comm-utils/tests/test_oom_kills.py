"""Processes that the kernel kills for lack of memory are counted from the beginning of a world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.oom_kills import OomKills
from comm_utils.testing.ring import Ring


def test_they_are_counted_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "vmstat"
    kills = OomKills(path)
    kills.begin()
    assert kills.since_begin() == 0  # not known
    path.write_text("nr_free_pages 12\noom_kill 3\n")
    assert kills.since_begin() == 0
    kills.begin()
    assert kills.since_begin() == 0
    path.write_text("nr_free_pages 12\noom_kill 5\n")
    assert kills.since_begin() == 2
    path.write_text("nr_free_pages 12\n")  # a kernel that does not count them
    assert kills.since_begin() == 0


def test_a_lost_rank_is_said_to_be_perhaps_one_of_them() -> None:
    first, second = Ring(0, world_size=2), Ring(1, world_size=2)
    for one in (first, second):
        one.call("barrier")
    first.begin()
    waits, gone = take_snapshot(first.reader), replace(take_snapshot(second.reader), process="ended", oom_kills=1)
    (group,) = {call.group for call in waits.calls}
    (finding, *_) = diagnose_group({0: waits, 1: gone}, group)
    assert finding.text.endswith("the kernel has killed a process of this host for lack of memory (see dmesg)")
