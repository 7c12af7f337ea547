"""What the recorder keeps of kinds, tags, groups and threads is bounded."""

from __future__ import annotations

import threading

import pytest

from comm_utils.flight_recorder import recorder as module
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.layout import WORDS
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring


def used_bytes(ring: Ring) -> int:
    return ring.recorder.memory.words[WORDS["entries_used"] // 8]


def test_tags_take_no_entries() -> None:
    ring = Ring()
    used = []
    tags = (0, 1, 500, (1 << 32) - 1, 1 << 32, -3)
    for tag in tags:
        ring.call("send", peer=1, tag=tag)
        used.append(used_bytes(ring))
    assert used[0] == used[3] < used[4] < used[5]
    assert [(one.tag, one.in_series) for one in ring.reader.calls()] == [(tag, 1) for tag in tags]


def test_a_tag_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KINDS", 100)
    monkeypatch.setattr(module, "_MOST_SERIES", 100)
    sender, receiver = Ring(0), Ring(1)
    receiver.call("recv", peer=1, tag=77_777)  # so that this one comes to the bound earlier
    for tag in range(300):
        sender.call("send", peer=1, tag=tag)
        receiver.call("recv", peer=0, tag=tag)
    for ring in (sender, receiver):
        assert len(ring.recorder._kinds) == 100
        assert len(ring.recorder._series) == 100
        assert [one.tag for one in ring.reader.calls()[-3:]] == [297, 298, 299]
        assert ring.reader.calls()[-1].in_series == 0
    # One of them counts the messages with tag 98, and both still count collectives.
    sender.begin("send", peer=1, tag=98)
    receiver.call("recv", peer=0, tag=98)
    for ring in (sender, receiver):
        ring.call()
        ring.call()
        assert ring.reader.calls()[-1].in_series == 2
    known = {rank: take_snapshot(ring.reader) for rank, ring in enumerate((sender, receiver))}
    assert diagnose_group(known, next(iter(sender.reader.groups.values()))) == []


def test_full_tables_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring()
    with caplog.at_level("WARNING", "comm"):
        for number in range(3000):
            ring.group(f"group {number}")
    (warning,) = caplog.messages
    assert "the 128 KiB for names of groups, kinds of calls and callers are used up" in warning
    assert len(ring.recorder._groups) < 2000


def test_the_count_of_a_lane_only_rises() -> None:
    ring = Ring()
    ring.call()
    kind = ring.recorder.kind(ring.group(), "all_reduce", "all_reduce", "float32", "sum")
    thread = threading.Thread(target=lambda: kind.end(kind.begin(1, depth=0)))
    thread.start()
    thread.join()
    assert ring.reader.count() == 2
    numbers = ring.recorder.numbers
    later = iter([9, 8, 10])
    kinds = ring.recorder._kinds
    kinds.clear()
    ring.recorder.numbers = later  # type: ignore[assignment]
    counts = []
    for _ in range(3):  # the second took its number before the first
        ring.begin()
        counts.append(ring.reader.count())
    assert counts == [9, 9, 10]
    assert next(numbers) == 3
