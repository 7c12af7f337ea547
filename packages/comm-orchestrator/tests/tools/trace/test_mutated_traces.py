"""``commctl trace summary`` and ``merge`` read damaged traces or refuse them with one sentence that names the file."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from comm_orchestrator.tools.trace.files import merge, read
from comm_orchestrator.tools.trace.summary import summarize
from comm_orchestrator.tools.trace.tables import format_summary
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces.traffic import traffic

CORPUS = Path(__file__).parents[4] / "comm-utils/tests/observability/corpus"
RECORDED = {path.name: path.read_bytes() for path in sorted((CORPUS / "recorded").iterdir())}
# Far more than any of these files needs, also on a loaded machine.
LIMIT_S = 10.0
SEEDS = 300

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


def use(folder: Path, output: Path) -> str:
    """What both commands do with ``folder``; the error's text, or nothing."""
    start = time.monotonic()
    try:
        traces = read(folder)
        found = summarize(traces)
        json.dumps(found.to_json()).encode()
        format_summary(found, io.StringIO()).encode()
        traffic(traces)
        merge(traces, output / "merged.json")
        json.loads((output / "merged.json").read_text(encoding="utf-8"))
    except ArgumentError as error:
        message = str(error)
    else:
        message = ""
    assert time.monotonic() - start < LIMIT_S
    assert not message or (str(folder) in message and len(message.encode()) < 2000)
    return message


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    assert use(CORPUS / "recorded", tmp_path) == ""


@pytest.mark.parametrize("folder", sorted((CORPUS / "failed").iterdir()), ids=lambda folder: folder.name)
def test_what_once_failed(folder: Path, tmp_path: Path) -> None:
    """Inputs that ended in a traceback, or took half a minute, before readers were bounded."""
    use(folder, tmp_path)


def test_traces_changed_at_random(tmp_path: Path) -> None:
    refused = 0
    for seed in range(SEEDS):
        try:
            refused += bool(use(written(mutated(RECORDED, seed), tmp_path / "trace"), tmp_path))
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise
    # Some changes leave a trace that can be read; a test in which all were refused would see little.
    assert SEEDS // 3 < refused < SEEDS


def test_a_claim_of_many_ranks_costs_nothing(tmp_path: Path) -> None:
    line = {"format": "comm-trace", "version": 1, "rank": 0, "world_size": 10**10}
    (tmp_path / "rank0.jsonl").write_text(json.dumps(line) + "\n")
    message = use(tmp_path, tmp_path)
    assert f"got 1 of {10**10} ranks' files; missing: rank1.jsonl, rank2.jsonl" in message
