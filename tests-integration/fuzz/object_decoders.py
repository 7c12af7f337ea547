"""Decoders of objects and of compressed elements, as a peer sends them through a collective."""

from __future__ import annotations

import enum
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy
import torch

from comm_collectives.compression.registry import make_codec
from comm_collectives.object_codec import ObjectDecodeError, decode_object, encode_object, register_object_type
from comm_collectives.objects import agreement
from comm_collectives.objects.channel import INLINE_BYTES, RECORD_NUMBERS
from comm_utils.errors import ArgumentError, CommError
from fuzz.bounds import Decoder

__all__ = ["DECODERS"]


@register_object_type
@dataclass
class Point:
    x: Any
    y: Any = 0


@register_object_type
class Colour(enum.Enum):
    RED = 1


@register_object_type
class Pair(NamedTuple):
    first: Any
    second: Any


_VALUES: tuple[Any, ...] = (
    [None, True, ..., 1, 2**70, 1.5, 2j, "text", b"bytes", bytearray(b"b"), range(3), slice(1, None), Decimal("1.5")],
    {"id": UUID(int=7), "path": PurePosixPath("a/b"), "zone": datetime(2026, 1, 2, tzinfo=timezone.utc)},
    [date(2026, 1, 2), timedelta(1, 2, 3), (1, 2), (1.0, 2.0), [1, 2], [1.0, 2.0], {1}, frozenset([2])],
    [OrderedDict(a=1), defaultdict(list, a=[1]), Counter("aab"), deque([1], 3)],
    [Point(1, [2]), Colour.RED, Pair(1, "b")],
    [torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([True]), torch.nn.Parameter(torch.ones(2))],
    [torch.float16, torch.device("cpu", 0), torch.Size([1, 2]), torch.ones(0, 3)],
    [numpy.arange(4, dtype="<i4").reshape(2, 2), numpy.float32(1), numpy.dtype("M8[ns]"), numpy.str_("a")],
    [numpy.array(["ab", "c"]), numpy.array([True]), numpy.array(["2026-01-01"], "M8[D]"), numpy.array([b"x"])],
    [[[[[[]]]]]],
)


def _decode_object(data: bytes) -> None:
    found = decode_object(data, allow_pickle=False)
    try:
        again = encode_object(found, allow_pickle=False)
    except ArgumentError:  # such as two zeros, equal and of different types, in a registered type of other fields
        return
    decode_object(again, allow_pickle=False)


# --- the records by which ranks agree before they send objects

_RECORD = struct.Struct(f"={RECORD_NUMBERS}q")
_RANKS = 3


def _exchanged(own: bytes, data: bytes) -> list[tuple[tuple[int, ...], memoryview]]:
    """What rank 0 has after the exchange, as two peers decide."""
    size = _RECORD.size + INLINE_BYTES
    padded = bytearray((own + data).ljust(size * _RANKS, b"\0"))
    parts = [memoryview(padded)[rank * size : (rank + 1) * size] for rank in range(_RANKS)]
    return [(_RECORD.unpack_from(part), part[_RECORD.size :]) for part in parts]


def _agree(data: bytes) -> None:
    root, to_root = (data[0] % (_RANKS + 1)) - 1 if data else -1, bool(data) and data[0] > 127
    to_root = to_root and root >= 0
    message = encode_object(1)
    mine = agreement.record_of("all_gather_object", root, 0, [message], allow_pickle=False)
    own = _RECORD.pack(*mine) + bytes(message).ljust(INLINE_BYTES, b"\0")
    channel: Any = SimpleNamespace(
        call="all_gather_object", W=_RANKS, rank=0, ranks=[4, 5, 6], exchange=lambda *_: _exchanged(own, data[1:])
    )
    offers = agreement.agree(channel, mine, message, None, root, to_root)
    if to_root and root != 0:
        return  # nothing comes to this rank
    for rank in range(_RANKS) if root < 0 or to_root else [root]:  # what this rank is about to allocate
        assert 0 < offers[rank].size <= 1 << 30, offers[rank]


def _offers() -> Sequence[bytes]:
    message = encode_object([1, "a"])
    plain = agreement.record_of("all_gather_object", -1, 0, [message], allow_pickle=False)
    part = _RECORD.pack(*plain) + bytes(message).ljust(INLINE_BYTES, b"\0")
    others = [
        agreement.record_of("all_gather_object", -1, 0, None, allow_pickle=False, failure=ValueError()),
        agreement.record_of("broadcast_object_list", 1, 3, [bytearray(1000)], allow_pickle=True),
        (plain[0], -1, 0, 1 << 62, 0, 1 << 62),
    ]
    changed = [_RECORD.pack(*one) + bytes(INLINE_BYTES) for one in others]
    return [b"\0" + part * 2, b"\2" + part * 2, *(b"\0" + one + part for one in changed)]


# --- compressed elements

_METHODS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit", "topk")


def _decompress(data: bytes) -> None:
    method, count, add = (*data[:3], 0, 0, 0)[:3]
    made = make_codec(_METHODS[method % len(_METHODS)])
    if not made.encoded_bytes(count):
        return
    wire = torch.frombuffer(bytearray(data[3:].ljust(made.encoded_bytes(count), b"\0")), dtype=torch.uint8)
    target = torch.zeros(count + 2)  # whose ends nobody may touch
    made.decode(wire[: made.encoded_bytes(count)].clone(), target[1:-1], bool(add & 1))
    assert target[0] == 0
    assert target[-1] == 0


def _compressed() -> Sequence[bytes]:
    found = []
    for place, name in enumerate(_METHODS):
        made = make_codec(name)
        wire = torch.zeros(made.encoded_bytes(200), dtype=torch.uint8)
        made.encode(torch.linspace(-1, 1, 200), wire)
        found.append(bytes([place, 200, 0]) + bytes(wire.tolist()))
    return found


DECODERS = (
    Decoder(
        "object", _decode_object, (ObjectDecodeError,), lambda: list(map(bytes, map(partial(encode_object), _VALUES)))
    ),
    Decoder("object-records", _agree, (CommError,), _offers),
    Decoder("compressed", _decompress, (CommError,), _compressed),
)
