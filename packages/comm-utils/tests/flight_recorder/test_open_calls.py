"""Calls under way are found, however many were made after them."""

from __future__ import annotations

import pytest

from comm_utils.flight_recorder.calls import Call
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.scanning import open_numbers
from comm_utils.flight_recorder.snapshot import decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch.open_calls import OpenCalls


def look(ring: Ring, opened: OpenCalls) -> list[Call]:
    assert ring.reader  # which reads new entries
    return opened.look()


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("later", [10, 300, 900])
def test_a_wait_on_an_old_call(later: int, between: bool) -> None:
    ring = Ring()
    opened = OpenCalls(ring.reader)
    ring.call(times=3)
    number, *_ = [ring.begin(state=IN_BACKGROUND) for _ in range(later)]
    if between:
        assert look(ring, opened) == []
    ring.recorder.kind(ring.group(), "all_reduce", "all_reduce", "float32", "sum").wait(number)
    assert [call.number for call in look(ring, opened)] == [number]
    assert [call.number for call in look(ring, opened)] == [number]
    snapshot = take_snapshot(ring.reader)
    assert [call.number for call in snapshot.waiting_calls()] == [number]
    assert snapshot.calls[0].number == (1 if later == 10 else number)
    assert number in [call.number for call in decode_snapshot(encode_snapshot(snapshot)).calls]
    ring.end(number)
    assert look(ring, opened) == []


def test_what_was_overwritten_is_not_open() -> None:
    ring = Ring(records=64)
    opened = OpenCalls(ring.reader)
    for _ in range(40):
        ring.begin()
    assert len(look(ring, opened)) == 40
    ring.call(times=50)
    assert [call.number for call in look(ring, opened)] == list(range(35, 41))
    ring.call(times=64)
    assert look(ring, opened) == []
    assert open_numbers(ring.reader, 0) == open_numbers(ring.reader, 1) == []


def test_a_record_that_is_written_late() -> None:
    ring = Ring()
    opened = OpenCalls(ring.reader)
    memory = ring.recorder.memory
    ring.call(times=10)
    begun = ring.begin()
    words = memory.words
    at = (4096 >> 3) + (begun << 3)
    words[at] = 0  # the thread has its number, and nothing more
    ring.call(times=10)
    assert look(ring, opened) == []
    words[at] = begun
    assert [call.number for call in look(ring, opened)] == [begun]


def test_thousands_of_open_records_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look makes no object for a call that nobody waits for, and sees the one that somebody does."""
    decoded: list[int] = []
    decode = RingReader.call

    def count(reader: RingReader, lane: int, number: int) -> Call | None:
        decoded.append(number)
        return decode(reader, lane, number)

    monkeypatch.setattr(RingReader, "call", count)
    ring = Ring(records=8192)
    opened = OpenCalls(ring.reader)
    for _ in range(8000):
        ring.begin(state=IN_BACKGROUND)
    assert look(ring, opened) == look(ring, opened) == []
    assert decoded == []
    waited_for = ring.begin()
    assert [call.number for call in look(ring, opened)] == decoded == [waited_for]
    assert len(take_snapshot(ring.reader).calls) == 512
