"""Collectives that are left open are laid to ranks that have certainly not made them."""

from __future__ import annotations

import pytest

from comm_utils.testing.ring import Ring
from comm_utils.watch import absence
from comm_utils.watch.absence import describe_missing, find_unfinished
from comm_utils.watch.world_view import WorldView


@pytest.mark.parametrize(
    ("made", "others", "is_missing"),
    [
        (3, 0, False),
        (2, 0, True),
        (2, 5, True),
        (0, 5, True),
        (2, 300, False),  # what it made in this group was overwritten
    ],
)
def test_who_has_not_made_a_call(made: int, others: int, is_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "_PATIENCE_S", 0.0)
    mine, theirs = Ring(0, records=64), Ring(1, records=64)
    mine.call(group="pair", times=2)
    mine.begin("broadcast", group="pair", root=0)
    if made:
        theirs.call(group="pair", times=made)
    theirs.call(group="another", times=others)
    view = WorldView(0, 2, mine.reader)
    view.local.readers[1] = theirs.reader
    (group,) = (one for one in mine.reader.groups.values() if one.name == "pair")
    found = find_unfinished(view, [group])
    assert bool(found) == is_missing
    if is_missing:
        assert found["pair"].startswith("broadcast is under way: rank 1 (pid ")
        assert "has not called broadcast" in found["pair"]


def test_a_few_of_very_many_missing_ranks_are_described() -> None:
    rings = [Ring(rank, world_size=20) for rank in range(20)]
    rings[0].begin()
    view = WorldView(0, 20, rings[0].reader)
    view.local.readers.update({rank: ring.reader for rank, ring in enumerate(rings) if rank})
    (group,) = rings[0].reader.groups.values()
    text = describe_missing(view, group, asks=False)
    assert text.count(" has not called all_reduce, for which rank 0 waits: it is in none of its calls") == 4
    assert text.endswith("; ranks 5, 6, 7, 8, 9, 10, 11, 12 and 7 more keep it waiting as well")
