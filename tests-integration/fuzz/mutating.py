"""Changes inputs at random: bytes, numbers as wide as sizes, and the values of JSON documents and lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

__all__ = ["mutated"]

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, -1e308, float("inf"), float("nan"), "", "0", "all_reduce", "\ud800", "\x1b[2J", "x" * 3000),
    *([], [0], [0, 1], [0] * 500, [[]], {}, {"a": 1}, {"ranks": [0]}, "environment", "file", "auto", "env://"),
)
_NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    64,
    127,
    128,
    255,
    256,
    4096,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_PIECES = (b"\0", b"\xff", b"\xed\xa0\x80", b"[", b"]", b"{", b"}", b'"', b",", b"-", b"\n", b"9" * 25, b"[" * 200)
_DEPTH = 6


def mutated(data: bytes, others: Sequence[bytes], kind: str, chance: random.Random, most_bytes: int) -> bytes:
    """Return ``data`` with some changes; parts of ``others`` may come in."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        change = chance.choice(_CHANGES[kind])
        data = change(data, others, chance)[:most_bytes]
    return data


def _flip(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return bytes([chance.randrange(256)])
    found = bytearray(data)
    found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def _set_byte(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    found = bytearray(data or b"\0")
    found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


def _insert(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(_PIECES) + data[at:]


def _number(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    width = chance.choice((1, 2, 4, 8))
    at = chance.randrange(max(1, len(data) - width + 1))
    number = chance.choice(_NUMBERS) & ((1 << 8 * width) - 1)
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def _cut(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + (b"" if chance.random() < 0.5 else data[at + chance.randrange(1, 64) :])


def _repeat(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    part = data[at : at + chance.randrange(1, 32)]
    return data[:at] + part * chance.choice((2, 3, 50)) + data[at:]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others) if others else data
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _document(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    changed = _json(data, chance)
    return _flip(data, others, chance) if changed is None else changed


def _line(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    changed = _json(lines[at], chance)
    if changed is None or chance.random() < 0.2:
        lines.insert(chance.randrange(len(lines) + 1), lines[at])
    else:
        lines[at] = changed
    return b"\n".join(lines)


def _json(data: bytes, chance: random.Random) -> bytes | None:
    """Change one value, or the key, of a document; None where it is none."""
    # A seal may stand before it.
    head, brace, rest = data.partition(b"{")
    try:
        value = json.loads(brace + rest if brace else data)
    except (ValueError, RecursionError):
        return None
    places = [place for place in _places(value) if place]
    if not places:
        return (head if brace else b"") + _dumped(chance.choice(_VALUES))
    *path, last = chance.choice(places)
    inner = value
    for key in path:
        inner = inner[key]
    if chance.random() < 0.2:
        removed = inner.pop(last)
        if isinstance(inner, dict) and chance.random() < 0.5:
            inner[chance.choice((*map(str, inner), "end", "x"))] = removed
    elif chance.random() < 0.05:
        inner[last] = json.loads("[" * 70 + "]" * 70)
    elif chance.random() < 0.3 and type(inner[last]) is int:
        inner[last] += chance.choice((-1, 1, 10**6, -(10**6), 2**31, 2**40, 1 << 62))
    else:
        inner[last] = deepcopy(chance.choice(_VALUES))
    return (head if brace else b"") + _dumped(value)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = ()
    if len(at) < _DEPTH:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in _places(one, (*at, key)))]


_Change = Callable[[bytes, Sequence[bytes], random.Random], bytes]
_BYTES: tuple[_Change, ...] = (_flip, _set_byte, _insert, _number, _number, _cut, _repeat, _splice)
_TEXT: tuple[_Change, ...] = (_flip, _set_byte, _insert, _insert, _cut, _repeat, _splice, _splice)
_CHANGES: dict[str, tuple[_Change, ...]] = {
    "bytes": _BYTES,
    "text": _TEXT,
    "json": (_document,) * 8 + _TEXT,
    "lines": (_line,) * 12 + _TEXT,
}
