"""Changes a recorded trace at random, as damage and hostile writers would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

__all__ = ["mutated"]

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**10, 10**400),
    *(0.5, -0.0, 1e308, -1e308, float("inf"), float("nan"), "", "0", "all_reduce", "isend", "\ud800", "\x1b[2J"),
    *("x" * 5000, [], [0], [1, 0], [0, 1], [0] * 2000, [[]], {}, {"end": True}, {"number": 0}, {"ranks": [0]}),
)


def mutated(files: Mapping[str, bytes], seed: int) -> dict[str, bytes]:
    """``files``, by name, with one to four changes that ``seed`` decides."""
    chance = random.Random(seed)
    found = dict(files)
    for _ in range(chance.choice((1, 1, 2, 4))):
        name = chance.choice(sorted(found))
        change = chance.choice((_value, _value, _value, _key, _lines, _bytes, _cut))
        found[name] = change(found[name], chance)
    return found


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = ()
    if len(at) < 4:  # an earlier change may have nested deeply
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in _places(one, (*at, key)))]


def _parsed_line(data: bytes, chance: random.Random) -> tuple[list[bytes], int, Any]:
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    try:
        return lines, number, json.loads(lines[number])
    except (ValueError, RecursionError):
        return lines, number, None


def _replaced(data: bytes, chance: random.Random, change: Callable[[Any, Any], None]) -> bytes:
    lines, number, value = _parsed_line(data, chance)
    places = [place for place in _places(value) if place]
    if places:
        place = chance.choice(places)
        inner = value
        for key in place[:-1]:
            inner = inner[key]
        change(inner, place[-1])
        lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _value(data: bytes, chance: random.Random) -> bytes:
    def change(inner: Any, key: Any) -> None:
        if chance.random() < 0.1:
            depth = chance.choice((3, 70, 900))
            inner[key] = json.loads("[" * depth + "]" * depth)
        elif chance.random() < 0.3 and type(inner[key]) is int:
            inner[key] += chance.choice((-1, 1, 10**6, -(10**6), 2**40, -(2**40), 1 << 62))
        else:
            inner[key] = deepcopy(chance.choice(_VALUES))

    return _replaced(data, chance, change)


def _key(data: bytes, chance: random.Random) -> bytes:
    def change(inner: Any, key: Any) -> None:
        value = inner.pop(key)
        if isinstance(inner, dict) and chance.random() < 0.5:
            inner[chance.choice(("end", "number", "ranks", "rank", "events", "complete", "x"))] = value
        elif isinstance(inner, list) and chance.random() < 0.5:
            inner.extend((value, deepcopy(chance.choice(_VALUES))))

    return _replaced(data, chance, change)


def _lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\n")
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    way = chance.randrange(3)
    if way == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif way == 1:
        lines.insert(other, lines[one])
    else:
        del lines[one]
    return b"\n".join(lines)


def _bytes(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice((1, 3, 20))):
        if found:
            found[chance.randrange(len(found))] = chance.choice(b'\x00\xff\n"[]{},:0123456789-eE\\u')
    return bytes(found)


def _cut(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + (b"" if chance.random() < 0.5 else data[start + chance.randrange(1, 200) :])
