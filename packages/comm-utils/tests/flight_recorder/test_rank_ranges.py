"""The ranks of large groups fit into entries."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils.flight_recorder import FlightRecorder, RingReader
from comm_utils.flight_recorder.layout import EntryType
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.rank_ranges import LARGEST_GROUP, packed_ranks, unpacked_ranks
from comm_utils.flight_recorder.snapshot import decode_snapshot, encode_snapshot, take_snapshot


@given(st.lists(st.integers(0, 9), max_size=30) | st.permutations(range(12)))
def test_ranges_are_the_ranks(ranks: list[int]) -> None:
    assert unpacked_ranks(json.loads(json.dumps(packed_ranks(ranks)))) == tuple(ranks)


def test_what_is_a_range() -> None:
    assert packed_ranks(range(1024)) == [[0, 1024, 1]]
    assert packed_ranks(range(3, 1024, 8)) == [[3, 128, 8]]
    assert packed_ranks([5, 6, 7]) == [5, 6, 7]
    assert packed_ranks([9, *range(100, 200)]) == [9, [100, 100, 1]]
    assert unpacked_ranks([3, 1, 2]) == (3, 1, 2)


def test_what_another_process_wrote_is_bounded() -> None:
    tracemalloc.start()
    for packed in ([[0, 1 << 60, 1]], [[0, -5, 1], [0, 5, 1]], [[0, 40_000, 1]] * 2, [[0, 0, 1]]):
        with pytest.raises(ValueError, match="a list of more ranks"):
            unpacked_ranks(packed)
    for packed in ({}, "12", [[1, 2]], [[1]], [[]], [None]):
        with pytest.raises((TypeError, ValueError)):
            unpacked_ranks(packed)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    memory = RingMemory(16, 0, 1)
    for number in range(100):
        content = {"name": str(number), "ranks": [[0, LARGEST_GROUP, 1]], "description": "", "backend": ""}
        memory.add_entry(EntryType.GROUP, content)
    assert len(RingReader(memory.memory).groups) == 8


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_a_large_world_is_recorded(order: str) -> None:
    ranks = list(range(4096 if order == "sorted" else 1500))
    if order == "shuffled":
        random.Random(1).shuffle(ranks)
    recorder = FlightRecorder()
    recorder._use(RingMemory(64, 0, len(ranks)))
    summing = recorder.kind(recorder.group_index("world", ranks, "d" * 200, "gloo"), "all_reduce", "all_reduce", "int8")
    summing.begin(1, 0)
    recorder.failure("world", "PeerLostError", "gone", ranks)
    reader = RingReader(recorder.memory.memory)
    (call,) = reader.calls()
    assert call.group.ranks == tuple(ranks)
    assert [one.text for one in reader.failures] == ["gone"]
    decoded = decode_snapshot(encode_snapshot(take_snapshot(reader)))
    assert decoded.calls[0].group == call.group


def test_entries_are_shortened_and_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    memory = RingMemory(16, 0, 1)
    recorder = FlightRecorder()
    recorder._use(memory)
    assert recorder.group_index("world", range(2), "x" * 50_000, "gloo") == 1
    recorder.failure("world", "PeerLostError", "é" * 5000, random.Random(1).sample(range(10_000), 1000))
    with caplog.at_level("WARNING", "comm"):
        for number in range(3):
            assert recorder.group_index(f"{number}" * 50_000, range(2), "", "gloo") == 0
    assert len(caplog.messages) == 1
    assert "cannot describe some calls" in caplog.messages[0]
    reader = RingReader(memory.memory)
    assert [(one.name, one.ranks, one.description) for one in reader.groups.values()] == [("world", (0, 1), "")]
    assert [one.text for one in reader.failures] == ["é" * 300]
