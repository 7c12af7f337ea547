"""Jobs in any state, also those that no program gets into: a diagnosis finds something or nothing, and never fails."""

from __future__ import annotations

import random
from typing import Any

import pytest

from comm_utils.flight_recorder.calls import Call, Failure, RingGroup, RingHeader
from comm_utils.flight_recorder.diagnosis import diagnose, diagnose_group
from comm_utils.flight_recorder.snapshot import RankSnapshot

WORLD = RingGroup("world", (0, 1, 2, 3, 4), "", "gloo")
PART = RingGroup("part", (1, 3, 4), "", "gloo")
MAKING = RingGroup("part (making)", (1, 3, 4), "", "gloo")


def random_call(some: random.Random, rank: int, group: RingGroup, number: int, series: dict[Any, int]) -> Call:
    end_ns = 0 if some.random() < 0.5 else 10 * number + 5
    common: dict[str, Any] = {
        "lane": 0,
        "number": number,
        "begin_ns": 10 * number,
        "end_ns": end_ns,
        "failed": some.random() < 0.1 and end_ns > 0,
        "group": group,
        "dtype": "float32",
        "op": "",
        "root": -1,
        "digest": 1,
        "caller": some.choice(["", "a.py:1 f"]),
        "is_waited_for": some.random() < 0.9,
        "is_limited": some.random() < 0.1,
        "is_on_device": some.random() < 0.1,
    }
    if some.random() < 0.4:
        name, tag = some.choice(["send", "recv"]), some.choice([0, 0, 0, 1])
        peers = [one for one in group.ranks if one != rank] + ([-1] if name == "recv" else [])
        peer = some.choice(peers)
        key = group.name, name, peer, tag
        series[key] = series.get(key, 0) + 1
        in_series = 0 if peer < 0 else series[key]
        elements = some.choice([4, 4, 4, 5])
        return Call(operation=name, call=name, peer=peer, elements=elements, in_series=in_series, tag=tag, **common)
    series[group.name] = series.get(group.name, 0) + 1
    common |= {"peer": -1, "tag": 0, "in_series": series[group.name]}
    if some.random() < 0.7:
        return Call(operation="all_reduce", call="all_reduce", elements=4, **common)
    size = len(group.ranks)

    def parts() -> tuple[int, ...] | None:
        count = size if some.random() < 0.95 else size - 1
        return None if some.random() < 0.4 else tuple(some.choice([1] * 7 + [2]) for _ in range(count))

    name = "all_to_all_single"
    return Call(operation=name, call=name, elements=size, sent=parts(), received=parts(), **common)


def random_rank(some: random.Random, rank: int) -> RankSnapshot:
    series: dict[Any, int] = {}
    groups = [WORLD, WORLD, PART, MAKING] if rank in PART.ranks else [WORLD]
    calls = [random_call(some, rank, some.choice(groups), number, series) for number in range(1, 1 + some.randrange(5))]
    failures = [
        Failure(
            some.choice(["world", "part", ""]),
            some.choice(["PeerLostError", "CommTimeoutError"]),
            some.choice(["", "why"]),
            some.randrange(50),
            (some.randrange(5),),
        )
        for _ in range(some.choice([0, 0, 0, 1, 2]))
    ]
    state = some.choice(["running"] * 5 + ["ended", "left", "stopped"])
    signal = 15 if state == "ended" and some.random() < 0.3 else 0
    header = RingHeader(rank, 5, 100 + rank, 0, 0, 0, signal=signal, state=1 if state == "left" else 0)
    return RankSnapshot(header, state, tuple(calls), tuple(failures), taken_ns=1000, threads=some.choice([1, 1, 1, 2]))


# With 17, one rank waits in a message and in a collective.
@pytest.mark.parametrize("seed", [0, 1, 2, 17])
def test_a_diagnosis_of_any_job_does_not_fail(seed: int) -> None:
    some, found = random.Random(seed), 0
    for _ in range(500):
        ranks = [random_rank(some, rank) for rank in range(5) if some.random() > 0.08]
        found += len(diagnose(ranks))
        for group in (WORLD, PART, MAKING):
            for finding in diagnose_group({one.rank: one for one in ranks}, group):
                assert finding.text
    assert found > 500
