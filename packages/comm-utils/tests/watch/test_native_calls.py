"""Shared memory compares its calls itself, but for the last of a group: those are compared by their records."""

from __future__ import annotations

from typing import Any

import pytest

from comm_utils.testing.ring import Ring
from comm_utils.watch.call_comparison import CallComparison
from comm_utils.watch.world_view import WorldView


class Ranks:
    """Rank 0, which compares, and the others."""

    def __init__(self, size: int = 2, records: int = 1024) -> None:
        self.rings = [Ring(rank, records, size) for rank in range(size)]
        self.raised: set[str] = set()
        view = WorldView(0, size, self.rings[0].reader)
        view.local.readers = {rank: self.rings[rank].reader for rank in range(1, size)}
        self.comparison = CallComparison(view, self.rings[0].reader, (), self.raised)

    def found(self, thoroughly: bool = False) -> dict[str, str]:
        assert self.rings[0].reader
        return {group: trouble.text for group, trouble in self.comparison.look(thoroughly)}


@pytest.mark.parametrize(
    ("operation", "mine", "theirs", "aspect"),
    [
        ("broadcast", {"root": 0}, {"root": 1}, "root"),
        ("all_reduce", {"op": "sum"}, {"op": "max"}, "reduce op"),
        ("all_reduce", {"elements": 1000}, {"elements": 900, "waited_for": False}, "number of elements"),
        ("broadcast", {"root": 0, "dtype": "int32"}, {"root": 0}, "dtype"),
    ],
)
def test_the_last_calls_are_compared(operation: str, mine: dict[str, Any], theirs: dict[str, Any], aspect: str) -> None:
    ranks = Ranks(3)
    for rank, ring in enumerate(ranks.rings):
        ring.native_call()
        ring.native_call(operation, **(theirs if rank == 1 else mine))
        ring.native_call("barrier", group="another")
    (text,) = ranks.found().values()
    assert f"differ in the {aspect}: in call 2 of the group" in text
    assert f"ranks 0 and 2 call {operation}" in text
    assert not ranks.found()  # nothing is new


def test_what_ranks_may_differ_in() -> None:
    ranks = Ranks()
    for rank, ring in enumerate(ranks.rings):
        ring.native_call("all_to_all_single", 2 + rank)
        ring.native_call("barrier", dtype="int32" if rank else "float32", op="max" if rank else "sum")
        ring.native_call("broadcast", op="max" if rank else "sum", root=1)
        ring.native_call(waited_for=bool(rank))
        ring.native_call("recv" if rank else "send", 3, root=1 - rank)
    ranks.rings[1].native_call("barrier")  # which the other has not made yet
    assert not ranks.found(thoroughly=True)


def test_a_call_before_many_of_other_groups_is_compared_at_the_end() -> None:
    ranks = Ranks()
    for rank, ring in enumerate(ranks.rings):
        ring.native_call("broadcast", root=rank, group="few")
        for _ in range(500):
            ring.native_call()
    assert not ranks.found()
    assert set(ranks.found(thoroughly=True)) == {"few"}


def test_ranks_may_know_groups_in_another_order() -> None:
    ranks = Ranks()
    ranks.rings[0].native_call("broadcast", root=0, group="one")
    ranks.rings[0].native_call("broadcast", root=0, group="other")
    # As if rank 1 had made the first call of rank 0, but for the names of the groups.
    ranks.rings[1].native_call("broadcast", root=0, group="other")
    ranks.rings[1].native_call("broadcast", root=1, group="one")
    assert set(ranks.found()) == {"one"}


def test_what_was_raised_is_not_found_again() -> None:
    ranks = Ranks()
    for rank, ring in enumerate(ranks.rings):
        ring.native_call("broadcast", root=rank)
    ranks.raised.add("world")
    assert not ranks.found()


def test_calls_that_were_overwritten_are_not_compared() -> None:
    ranks = Ranks(records=16)
    ranks.rings[0].native_call("broadcast", root=0)
    ranks.rings[1].native_call("broadcast", root=1)
    for _ in range(20):
        ranks.rings[0].native_call(group="another")
    assert not ranks.found(thoroughly=True)


@pytest.mark.parametrize("lane", ["native", "python"])
def test_ranks_that_are_about_to_come_are_named_as_well(lane: str) -> None:
    ranks = Ranks(6)

    def make_calls(rank: int) -> None:
        ring = ranks.rings[rank]
        call = ring.native_call if lane == "native" else ring.call
        call("all_reduce")
        call("all_reduce", op="max" if rank in (1, 5) else "sum")

    for rank in range(5):
        make_calls(rank)
    assert ranks.found() == {}  # rank 5 may come
    make_calls(5)
    (text,) = ranks.found().values()
    assert "ranks 0, 2, 3 and 4 call all_reduce(4 elements of float32, op sum)" in text
    assert "ranks 1 and 5 call all_reduce(4 elements of float32, op max)" in text


@pytest.mark.parametrize("thoroughly", [False, True], ids=["while it runs", "at the end"])
def test_a_rank_that_does_not_come_is_not_awaited_for_long(thoroughly: bool) -> None:
    ranks = Ranks(3)
    ranks.rings[0].native_call()
    ranks.rings[1].native_call(op="max")
    found = ranks.found(thoroughly)
    assert bool(found) == thoroughly
    while not found:  # ends within a second, or the test's time is over
        found = ranks.found()
    (text,) = found.values()
    assert "rank 1 calls all_reduce(4 elements of float32, op max)" in text
