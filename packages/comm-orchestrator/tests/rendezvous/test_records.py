"""What is wrong with those who came, from their records alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from comm_orchestrator.rendezvous.records import (
    AGREED_SETTINGS,
    AGREED_VARIABLES,
    RankRecord,
    check_devices,
    check_record,
    device_indices,
    format_hosts,
    format_ranks,
    missing_ranks,
)


def arrival(rank: int, host: str = "a", **changes: object) -> RankRecord:
    one = RankRecord(rank, 4, host, f"{host}-id", 100 + rank, program="train.py")
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (range(100), "ranks 0-99"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_places_of_many_hosts() -> None:
    assert format_hosts([arrival(0), arrival(2, "b"), arrival(1)]) == "ranks 0, 1 on a, rank 2 on b"
    many = [arrival(0, f"h{number}") for number in range(11)]
    assert format_hosts(many).endswith("rank 0 on h7 and 3 more hosts")


def test_missing_names_who_and_where_the_others_are() -> None:
    refusal = missing_ranks({0: arrival(0), 2: arrival(2, "b")}, 4, 5.0)
    assert refusal.kind == "CommTimeoutError"
    assert refusal.message.startswith("ranks 1, 3 of 4 did not come within 5 s (rank 0 on a, rank 2 on b came); check")


def test_a_record_survives_the_store() -> None:
    one = arrival(
        1, problem=("LaunchError", "text"), unavailable_reasons={"ccl": None, "gloo": "why"}, settings={"a.b": [1]}
    )
    text = json.dumps(one.to_plain())
    back = RankRecord.from_plain(json.loads(text))
    assert RankRecord.from_plain({"of_another_release": 1, **json.loads(text)}) == back
    assert back == replace(one, problem=["LaunchError", "text"])


def test_those_who_fit() -> None:
    assert check_record(arrival(0), {}, arrival(0)) is None
    assert check_record(arrival(0), {0: arrival(0)}, arrival(1, "b", local_rank=0, address="x")) is None


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"world_size": 8}, ("disagree on the world size", "says 4", "says 8")),
        ({"rank": 0, "pid": 7}, ("two processes have rank 0: pid 100 on a, train.py", "pid 7 on b, train.py")),
        ({"versions": {"torch": "1"}}, ("different versions of torch", "has none", "has 1")),
        ({"settings": {"x.y": 2}}, ("disagree on the setting x.y", "has None", "has 2")),
        ({"problem": ("LaunchError", "no fabric")}, ("rank 1 (pid 101 on b, train.py) cannot go on: no fabric",)),
    ],
)
def test_those_who_do_not(changes: dict[str, object], texts: tuple[str, ...]) -> None:
    refusal = check_record(arrival(0), {0: arrival(0)}, replace(arrival(1, "b"), **changes))  # type: ignore[arg-type]
    assert refusal is not None
    assert refusal.kind == "LaunchError"
    for text in texts:
        assert text in refusal.message


def gpu(rank: int, host: str = "a", count: int = 2, visible: str | None = None) -> RankRecord:
    return arrival(rank, host, device_type="cuda", device_count=count, visible_devices=visible)


def test_devices_that_suffice() -> None:
    assert check_devices([gpu(0), gpu(1), gpu(2, "b"), gpu(3, "b")], {"cuda"}) is None
    assert check_devices([gpu(0, count=0), gpu(1, count=0)], {"cpu"}) is None
    assert device_indices([gpu(0), gpu(1), gpu(2, "b"), gpu(3, "b")]) == {0: 0, 1: 1, 2: 0, 3: 1}


def test_devices_that_the_launcher_gave_one_each() -> None:
    ranks = [gpu(0, count=1, visible="0"), gpu(1, count=1, visible="1")]
    assert check_devices(ranks, {"cuda"}) is None
    assert device_indices(ranks) == {0: 0, 1: 0}


@pytest.mark.parametrize("visible", [None, "0"])
def test_devices_that_do_not_suffice(visible: str | None) -> None:
    ranks = [gpu(0, count=1, visible=visible), gpu(1, count=1, visible=visible), gpu(2, "b", count=1)]
    refusal = check_devices(ranks, {"cpu", "cuda"})
    assert refusal is not None
    assert "2 ranks on a (ranks 0, 1) have 1 cuda device between them" in refusal.message
    assert "dist_backend='gloo'" in refusal.message


def test_the_launchers_local_ranks_are_the_devices() -> None:
    ranks = [replace(gpu(0), local_rank=1), replace(gpu(1), local_rank=0)]
    assert device_indices(ranks) == {0: 1, 1: 0}


def test_of_a_long_message_both_ends_are_kept() -> None:
    first = arrival(0)
    refusal = check_record(first, {0: first}, replace(arrival(0, "x" * 10_000), pid=7))
    assert refusal is not None
    assert len(refusal.message) < 3100
    assert refusal.message.startswith("two processes have rank 0: pid 100 on a")
    assert refusal.message.endswith("a MASTER_PORT of its own")


def test_the_page_names_what_must_agree() -> None:
    page = (Path(__file__).parents[4] / "docs/setting-up.md").read_text(encoding="utf-8")
    table = page.partition("### Values that must agree")[2].partition("\n## ")[0]
    named, section = set(), ""
    for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE):
        for key in re.findall(r"`([A-Za-z_.]+)`", cell):
            section = key.rpartition(".")[0] or section  # `a.b`, `c` are a.b and a.c
            named |= {key, f"{section}.{key}"}
    assert {*AGREED_SETTINGS, *AGREED_VARIABLES} <= named
