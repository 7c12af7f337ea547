"""A diagnosis looks at each rank a few times, however many ranks wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex

import pytest

from comm_utils.flight_recorder import awaited_ranks
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.matching import compare_parts
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.testing.ring import Ring

_SIZE = 32


@dataclass(frozen=True)
class Counted(RankSnapshot):
    """A snapshot that counts how often its calls are looked through."""

    def waiting_calls(self) -> list[Call]:
        looks[self.rank] += 1
        return super().waiting_calls()


looks: Counter[int] = Counter()


def _counted(ring: Ring) -> RankSnapshot:
    snapshot = take_snapshot(ring.reader)
    return Counted(**{field.name: getattr(snapshot, field.name) for field in fields(snapshot)})


def test_ranks_that_wait_for_one() -> None:
    rings = [Ring(rank, world_size=_SIZE) for rank in range(_SIZE)]
    for ring in rings[1:]:
        ring.begin()
    known = {rank: _counted(ring) for rank, ring in enumerate(rings)}
    (group,) = rings[1].reader.groups.values()
    looks.clear()
    (finding,) = diagnose_group(known, group)
    assert (finding.kind, finding.ranks) == (FindingKind.MISSING, (0,))
    assert max(looks.values()) < 5


def test_messages_that_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rings = [Ring(rank, world_size=_SIZE) for rank in range(_SIZE)]
    for rank, ring in enumerate(rings):
        ring.begin("recv", peer=(rank - 1) % _SIZE)
    known = {rank: take_snapshot(ring.reader) for rank, ring in enumerate(rings)}
    (group,) = rings[0].reader.groups.values()
    searches: list[object] = []
    search = awaited_ranks.received_from_any

    def received_from_any(*arguments: Any) -> set[tuple[int, int]]:
        searches.append(arguments)
        return search(*arguments)

    monkeypatch.setattr(awaited_ranks, "received_from_any", received_from_any)
    assert len(diagnose_group(known, group)) == _SIZE
    assert len(searches) == 1


class Ranks(tuple[int, ...]):
    """Ranks in which none is searched for."""

    __slots__ = ()

    def index(self, value: Any, start: SupportsIndex = 0, stop: SupportsIndex = 0, /) -> int:
        raise AssertionError


def test_split_sizes() -> None:
    ranks = tuple(range(10, 10 + _SIZE))
    group = RingGroup("world", Ranks(ranks))

    def call(rank: int) -> Call:
        sent = tuple(5 if (rank, to) == (20, 15) else 1 for to in ranks)
        name = "all_to_all_single"
        return Call(0, 1, 0, 0, False, group, name, name, "float32", "", -1, -1, 0, _SIZE, 1, 0, sent, (1,) * _SIZE)

    text, culprits = compare_parts(group, {rank: call(rank) for rank in ranks})
    assert "rank 20 sends 5 elements to rank 15, which expects 1" in text
    assert culprits == (15, 20)
