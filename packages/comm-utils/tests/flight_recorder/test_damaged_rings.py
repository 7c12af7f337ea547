"""Whatever is in a ring, reading it gives less, or :class:`RingError`."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from comm_utils import json_files
from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings, RingError, RingReader, open_ring
from comm_utils.flight_recorder.diagnosis import diagnose
from comm_utils.flight_recorder.layout import (
    CLOCK,
    ENTRY,
    HEADER,
    HEADER_BYTES,
    LANE_OFFSETS,
    LANES,
    MAGIC,
    NATIVE_KIND,
    RECORD,
    RECORD_BYTES,
    STACK_HEAD,
    WORDS,
    EntryType,
    packed_kind,
    unpacked_kind,
)
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.scanning import calls_numbered, native_marks
from comm_utils.flight_recorder.snapshot import decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.flight_recorder.torch_dump import torch_dumps

RECORDS = 16
SPLITS_AT = HEADER_BYTES + LANES * RECORDS * RECORD_BYTES


def written() -> bytes:
    """A ring with some of everything."""
    memory = RingMemory(RECORDS, 1, 4)
    recorder = FlightRecorder()
    recorder._use(memory)
    memory.add_entry(EntryType.PROCESS, {"host": "node", "identity": "i", "job": "j", "python": "3", "program": "p"})
    codes = {"operations": ["all_reduce", "send"], "dtypes": ["float32"], "ops": ["sum"], "calls": [""]}
    memory.add_entry(EntryType.CODES, codes)
    group = recorder.group_index("world", (0, 1, 2, 3), "of all", "gloo")
    exchange = recorder.kind(group, "all_to_all_single", "all_to_all", "int8")
    summing = recorder.kind(group, "all_reduce", "all_reduce", "float32", "sum")
    sending = recorder.kind(group, "send", "isend", "float32", peer=2, tag=3)
    for number in range(20):
        exchange.end(exchange.begin(0, 0, [number, 1, 2, 3], [3, 2, 1, number]))
    sending.end(sending.begin(9, 0))
    summing.fail(summing.begin(4, 0))
    summing.begin(5, 0)
    for number in range(1, 4):  # as native code does
        kind = packed_kind(number % 2, 0, 0, group)
        at = HEADER_BYTES + (RECORDS + (number & RECORDS - 1)) * RECORD_BYTES
        RECORD.pack_into(memory.memory, at, number, 5, 6, kind, 7, number, 0, 2)
    CLOCK.pack_into(memory.memory, LANE_OFFSETS[1], 3, 5, 1000, 0.5)
    recorder.failure("world", "PeerLostError", "no route")
    memory.set_stack("line 1\nline 2")
    return bytes(memory.memory)


RING = written()
ENTRIES_AT = HEADER.unpack_from(RING)[10]
STACK_AT = HEADER.unpack_from(RING)[11]
# Where damage matters, and everywhere else.
PLACES = st.one_of(
    st.integers(0, HEADER.size - 1),
    st.integers(LANE_OFFSETS[0], max(WORDS.values()) + 7),
    st.integers(HEADER_BYTES, SPLITS_AT + 200),
    st.integers(ENTRIES_AT, ENTRIES_AT + 1500),
    st.integers(STACK_AT, STACK_AT + STACK_HEAD.size + 20),
    st.integers(0, len(RING) - 1),
)
WORD = struct.Struct("<Q")
VALUES = st.one_of(st.sampled_from((0, 1, (1 << 64) - 1, 1 << 63, 1 << 62, 1 << 32)), st.integers(0, (1 << 64) - 1))


def read_all(data: bytes) -> None:
    """Read everything that there is to read, in all the ways in which others do."""
    reader = RingReader(data)
    for lane in range(LANES):
        assert len(reader.calls(lane)) <= reader.records
        assert len(list(reader.backwards(lane))) <= reader.records
        for group in reader.groups.values():
            assert len(calls_numbered(reader, group.name, range(8), lane)) <= 8
    for numbered in native_marks(reader, reader.records).values():
        assert len(numbered) <= reader.records
        reader.calls(lane, after=3, most=2)
    reader.open_calls()
    stack = reader.stack()
    assert stack is None or len(stack.text) <= len(data)
    snapshot = take_snapshot(reader)
    str(list(map(str, snapshot.calls)))
    diagnose([snapshot])
    torch_dumps([snapshot])
    with contextlib.suppress(RingError):  # too large, where the damage says so
        decode_snapshot(encode_snapshot(snapshot))


def test_memory_that_nobody_wrote_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = json_files.parse
    monkeypatch.setattr(json_files, "parse", lambda text, what: (parsed.append(text), parse(text, what))[1])
    damaged = bytearray(RING)
    WORD.pack_into(damaged, WORDS["entries_used"], 1 << 40)
    assert RingReader(bytes(damaged)).groups == RingReader(RING).groups
    assert parsed
    assert "" not in parsed


def test_the_whole_ring_reads() -> None:
    reader = RingReader(RING)
    assert [one.operation for one in reader.calls(1)] == ["send", "all_reduce", "send"]
    assert [one.begin_ns for one in reader.calls(1)] == [1000, 1000, 1000]
    last = reader.calls()[-4:]
    assert [str(one).partition("(")[0] for one in last] == ["all_to_all", "isend", "all_reduce", "all_reduce"]
    assert last[0].sent == (19, 1, 2, 3)
    read_all(RING)


@given(st.lists(st.tuples(PLACES, VALUES), min_size=1, max_size=6))
@example([(LANE_OFFSETS[0], (1 << 64) - 1)])
@example([(WORDS["entries_used"], (1 << 64) - 1)])
@example([(LANE_OFFSETS[1] + 24, 0x7FF8 << 48)])  # a clock whose tick is not a number
@example([(LANE_OFFSETS[1] + 24, 0x7FF0 << 48)])  # or infinite
@example([(ENTRIES_AT, 0)])
@example([(STACK_AT + 8, (1 << 64) - 1)])
def test_words_that_are_overwritten(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(RING)
    for place, value in changes:
        WORD.pack_into(damaged, min(place, len(damaged) - 8), value)
    with contextlib.suppress(RingError):
        read_all(bytes(damaged))


@given(st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=30))
def test_bytes_that_are_overwritten(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(RING)
    for place, value in changes:
        damaged[place] = value
    with contextlib.suppress(RingError):
        read_all(bytes(damaged))


@given(st.integers(0, len(RING) - 1))
def test_rings_that_are_cut_off(size: int) -> None:
    with pytest.raises(RingError):
        RingReader(RING[:size])


@given(st.binary(max_size=200), st.integers(0, 6))
def test_entries_of_any_content(text: bytes, kind: int) -> None:
    damaged = bytearray(RING)
    used = WORD.unpack_from(RING, WORDS["entries_used"])[0]
    ENTRY.pack_into(damaged, ENTRIES_AT + used, kind, len(text), 1)
    damaged[ENTRIES_AT + used + ENTRY.size : ENTRIES_AT + used + ENTRY.size + len(text)] = text
    WORD.pack_into(damaged, WORDS["entries_used"], used + ENTRY.size + (len(text) + 7) // 8 * 8)
    read_all(bytes(damaged))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ("name", "ranks", "description", "backend", "operation", "call", "dtype", "group", "op", "root", "peer", "tag",
         "error", "text", "at", "operations", "dtypes", "ops", "host", "job")), inner, max_size=8),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.sampled_from(list(EntryType)))
def test_entries_of_any_json(content: object, kind: EntryType) -> None:
    import json

    text = json.dumps(content).encode()[:4000]
    test_entries_of_any_content.hypothesis.inner_test(text, int(kind))  # type: ignore[attr-defined]


@given(st.binary(max_size=64))
def test_files_that_are_no_rings(data: bytes) -> None:
    for content in (data, MAGIC + data, data + bytes(HEADER_BYTES), MAGIC + data + bytes(HEADER_BYTES)):
        with pytest.raises(RingError):
            RingReader(content)


def test_reading_takes_no_more_than_the_file(tmp_path: Path) -> None:
    """A header that promises much costs nothing."""
    damaged = bytearray(RING)
    fields = list(HEADER.unpack_from(damaged))
    fields[1] = 1 << 20  # records
    fields[9] = HEADER_BYTES + LANES * (1 << 20) * RECORD_BYTES
    fields[10] = fields[11] = fields[9] + 8
    fields[12] = fields[11] + STACK_HEAD.size
    HEADER.pack_into(damaged, 0, *fields)
    with pytest.raises(RingError, match="parts do not fit"):
        RingReader(bytes(damaged))
    (tmp_path / "large").touch()
    with (tmp_path / "large").open("r+b") as file:
        file.truncate((1 << 30) + 1)
    began, _ = time.monotonic(), tracemalloc.start()
    with pytest.raises(RingError, match="bytes; a ring has"):
        open_ring(tmp_path / "large")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert time.monotonic() - began < 5


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "link.ring").symlink_to(tmp_path / "target.ring")
    (tmp_path / "target.ring").write_bytes(RING)
    with pytest.raises(OSError, match="link"):
        open_ring(tmp_path / "link.ring")
    with pytest.raises(FileNotFoundError):
        open_ring(tmp_path / "none.ring")
    (tmp_path / "empty.ring").touch()
    with pytest.raises(RingError, match=r"empty\.ring: 0 bytes"):
        open_ring(tmp_path / "empty.ring")


@given(
    st.integers(0, 63), st.integers(0, 63), st.integers(0, 15), st.integers(0, 4095), st.booleans()
)  # fmt: skip
def test_kinds_of_native_code(operation: int, dtype: int, op: int, group: int, asynchronous: bool) -> None:
    packed = packed_kind(operation, dtype, op, group, asynchronous)
    assert packed & NATIVE_KIND
    assert packed < 1 << 32
    expected = {"operation": operation, "dtype": dtype, "op": op, "group": group, "asynchronous": int(asynchronous)}
    assert unpacked_kind(packed) == expected


def test_a_reader_sees_calls_while_they_are_made(tmp_path: Path) -> None:
    """Numbers and contents belong together, however fast they are overwritten."""
    import threading

    recorder = FlightRecorder()
    recorder.settings = FlightRecorderSettings(directory=str(tmp_path), records=32)
    recorder.open(0, 1, "job")
    assert recorder.path is not None
    group = recorder.group_index("g", (0,), "", "gloo")
    summing = recorder.kind(group, "all_reduce", "all_reduce", "int8")
    stop = threading.Event()

    def record() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            summing.end(summing.begin(number, 0))

    thread = threading.Thread(target=record)
    thread.start()
    reader = open_ring(recorder.path)
    seen = 0
    try:
        for _ in range(300):
            reader.refresh()
            for one in reader.calls():
                assert one.elements == one.number == one.in_series
                seen += 1
    finally:
        stop.set()
        thread.join()
        reader.close()
        recorder.close()
    assert seen > 300


def test_a_ring_that_is_cut_off_while_it_is_read_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.ring"
    path.write_bytes(written())
    by_refresh, by_count = open_ring(path), open_ring(path)
    assert by_refresh.calls()
    assert by_count.calls()
    with path.open("r+b") as file:
        file.truncate(0)
    # Reading the mapping would end this process with SIGBUS.
    by_refresh.refresh()
    assert by_refresh.record(0, 1) is None
    assert by_count.count() == 0
    for reader in (by_refresh, by_count):
        assert reader.calls() == list(reader.backwards()) == reader.open_calls() == []
        assert reader.header.rank == 1
        reader.close()
