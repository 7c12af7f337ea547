"""What the recorder keeps of kinds, tags, groups and threads is bounded."""

from __future__ import annotations

import os
import threading

import pytest

from comm_utils.flight_recorder import recorder as module
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.layout import WORDS
from comm_utils.flight_recorder.reader import RingReader
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


def test_groups_that_have_ended_make_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring()
    ring.recorder.failure("world", "CommTimeoutError", "the first")
    ring.call(group="stays")
    ring.native_call(group="stays too")
    with caplog.at_level("WARNING", "comm"):
        for number in range(3000):
            ring.call(group=f"group {number}")
            ring.native_call(group=f"group {number}")
            if number == 1500:
                ring.recorder.failure("world", "CommTimeoutError", "the second")
                reader = ring.reader
            if number > 1500 and number % 7 == 0:
                reader.refresh()
                assert reader.calls()[-1].group.name == f"group {number}"
            ring.recorder.end_group(f"group {number}")
    assert caplog.messages == []
    for _ in range(2):
        ring.call(group="stays")
        ring.native_call(group="stays too")
    for one in (reader, RingReader(ring.recorder.memory.memory)):
        one.refresh()
        assert [failure.text for failure in one.failures] == ["the first", "the second"]
        assert [(call.group.name, call.in_series) for call in one.calls(0)[-2:]] == [("stays", 2), ("stays", 3)]
        assert [call.group.name for call in one.calls(1)[-2:]] == ["stays too", "stays too"]
        # Calls that were made lately are described, whatever has become of their groups.
        assert one.calls(0)[-50].group.name == "group 2952"
        assert len(one.groups) < 1000
        assert one.header.pid == os.getpid()
    assert len(ring.recorder._kinds) < 2000


@pytest.mark.parametrize("size", [1000, 20000])
def test_groups_with_long_descriptions_make_room_as_well(caplog: pytest.LogCaptureFixture, size: int) -> None:
    ring = Ring()
    with caplog.at_level("WARNING", "comm"):
        for number in range(300):
            ring.recorder.group_index(f"group {number}", [0, 1], "d" * size, "gloo")
            ring.call(group=f"group {number}")
            ring.recorder.end_group(f"group {number}")
    assert caplog.messages == []
    assert ring.reader.calls()[-1].group.name == "group 299"


def test_an_entry_is_read_whole_or_not_while_others_are_left_out() -> None:
    ring = Ring()
    ring.call(group="stays")
    for number in range(20):
        ring.group(f"group {number}")
    reader, memory = ring.reader, ring.recorder.memory
    before = reader.groups
    number = memory.word("rewritten")
    memory.set_word("rewritten", number + 1)  # it has begun to
    memory.memory[memory._entries_at : memory._entries_at + 64] = bytes(64)
    reader.refresh()
    assert reader.groups is before
    assert reader.calls()[-1].group.name == "stays"
    memory.set_word("rewritten", number + 2)
    reader.refresh()
    assert reader.calls() == []


def test_the_count_of_a_lane_only_rises() -> None:
    ring = Ring()
    ring.call()
    kind = ring.recorder.kind(ring.group(), "all_reduce", "all_reduce", "float32", "sum")
    thread = threading.Thread(target=lambda: kind.end(kind.begin(1, 0)))
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


def test_code_that_is_compiled_again_and_again_takes_one_entry() -> None:
    """As a cell of a notebook."""
    ring = Ring()
    used = []
    for _ in range(100):
        exec(compile("ring.call()", "/cell.py", "exec"), {"ring": ring})
        used.append(used_bytes(ring))
    assert used[0] == used[-1]
    assert {call.caller for call in ring.reader.calls()} == {"/cell.py:1 <module>"}


def test_places_of_calls_leave_room_for_groups_and_kinds(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring()
    with caplog.at_level("WARNING", "comm"):
        for number in range(2500):
            exec(compile("ring.call()", f"/{'path' * 10}/{number}.py", "exec"), {"ring": ring})
        for number in range(100):
            ring.call(group=f"group {number}")
    (warning,) = caplog.messages
    assert "has noted 64 KiB of lines of the program that make calls" in warning
    assert [call.group.name for call in ring.reader.calls()[-100:]] == [f"group {number}" for number in range(100)]


def test_steps_and_failures_of_groups_that_have_ended_make_room_as_well(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring()
    ring.recorder.failure("world", "CommTimeoutError", "stays")
    reader, read, heard = ring.reader, 0, list[str]()
    with caplog.at_level("WARNING", "comm"):
        for number in range(1500):
            name = f"group {number}"
            ring.call(group=name)
            ring.call("barrier", group=f"{name} (monitored barrier)")
            ring.recorder.failure(name, "CommTimeoutError", f"{number} {'x' * 200}")
            ring.recorder.end_group(name)
            reader.refresh()
            new = reader.failures_after(read)
            read = new[-1][0]
            heard += [failure.text.split()[0] for _, failure in new]
    assert caplog.messages == []
    assert heard == ["stays", *map(str, range(1500))]
    assert ring.reader.failures[0].text == "stays"
    assert len(ring.reader.failures) < 1000
    assert ring.reader.calls()[-1].group.name == "group 1499 (monitored barrier)"
