"""Decoders of the flight recorder: the ring of a process that may have ended anywhere, and what ranks send of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from comm_utils.flight_recorder import FlightRecorder, RingError, RingReader
from comm_utils.flight_recorder.diagnosis import diagnose
from comm_utils.flight_recorder.layout import HEADER, HEADER_BYTES, LANE_OFFSETS, LANES, WORDS, EntryType
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.flight_recorder.snapshot import RankSnapshot, decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.flight_recorder.torch_dump import torch_dumps
from comm_utils.watch.remote_ranks import decode_answer, decode_digests, decode_notice
from fuzz.bounds import Decoder

__all__ = ["DECODERS"]

_ROOT = Path(__file__).resolve().parents[2]
_RECORDS = 16
# A ring has hundreds of kilobytes, of which most are never read: an input is a list of words that are overwritten.
_CHANGE = struct.Struct("<IQ")


@lru_cache
def _ring() -> bytes:
    """Return a ring with some of everything."""
    memory = RingMemory(_RECORDS, 1, 4)
    recorder = FlightRecorder()
    recorder._use(memory)
    memory.add_entry(EntryType.PROCESS, {"host": "node", "identity": "i", "job": "j", "python": "3", "program": "p"})
    memory.add_entry(EntryType.CODES, {"operations": ["all_reduce", "send"], "dtypes": ["float32"], "ops": ["sum"]})
    group = recorder.group_index("world", (0, 1, 2, 3), "of all", "gloo")
    exchange = recorder.kind(group, "all_to_all_single", "all_to_all", "int8")
    summing = recorder.kind(group, "all_reduce", "all_reduce", "float32", "sum")
    for number in range(20):
        exchange.end(exchange.begin(0, 0, [number, 1, 2, 3], [3, 2, 1, number]))
    summing.fail(summing.begin(4, 0))
    summing.begin(5, 0)
    recorder.failure("world", "RuntimeError", "no route")
    memory.set_stack("line 1\nline 2")
    return bytes(memory.memory)


def _use(snapshot: RankSnapshot) -> None:
    str(list(map(str, snapshot.calls))).encode()
    str(diagnose([snapshot])).encode()
    torch_dumps([snapshot])


def _read(data: bytes) -> None:
    ring = bytearray(_ring())
    for place, value in _CHANGE.iter_unpack(data[: len(data) // _CHANGE.size * _CHANGE.size]):
        struct.pack_into("<Q", ring, place % (len(ring) - 7), value)
    reader = RingReader(ring)
    for lane in range(LANES):
        assert len(reader.calls(lane)) <= reader.records
        assert len(list(reader.backwards(lane))) <= reader.records
    reader.open_calls()
    reader.stack()
    snapshot = take_snapshot(reader, is_local=False)
    _use(snapshot)
    with suppress(RingError):  # too large, where the damage says so
        decode_snapshot(encode_snapshot(snapshot))


def _changes() -> Sequence[bytes]:
    splits, entries, stack, _ = HEADER.unpack_from(_ring())[9:13]
    places = [*range(8, HEADER.size, 8), *LANE_OFFSETS, *WORDS.values(), HEADER_BYTES, splits, entries, stack]
    one = [_CHANGE.pack(place, value) for place in places for value in (1, 1 << 32, (1 << 64) - 1)]
    return [b"", *one]


def _snapshots() -> Sequence[bytes]:
    data = encode_snapshot(take_snapshot(RingReader(_ring()), is_local=False))
    return [data.replace(str(_ROOT).encode(), b"/project")]  # what is kept says nothing of this machine


def _notice(data: bytes) -> None:
    decode_answer(data)
    "".join(map(str, decode_notice(data) or ())).encode()


def _digests(data: bytes) -> None:
    "".join(decode_digests(data)).encode()


DECODERS = (
    Decoder("ring", _read, (RingError,), _changes),
    Decoder("ring-snapshot", lambda data: _use(decode_snapshot(data)), (RingError,), _snapshots, "json"),
    Decoder(
        "notice", _notice, (), lambda: [b'{"group": "world", "error": "RuntimeError", "text": "no", "last": 3}'], "json"
    ),
    Decoder("digests", _digests, (), lambda: [b'{"world": [3, 18446744073709551615], "tp": [0, 1]}'], "json"),
)
