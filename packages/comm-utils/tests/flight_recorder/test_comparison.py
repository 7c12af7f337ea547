"""Calls that differ are found by their digests, however many followed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose, diagnose_group
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.matching import compare_calls
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch import call_comparison
from comm_utils.watch.comparison import disagreement, first_difference, mismatch, neighbours
from comm_utils.watch.world_view import WorldView

# Of a call, from the operation to the tag.
OPERATION = "all_reduce", "all_reduce", "float32", "sum", -1, -1, 0


def pair(records: int = 1024) -> tuple[Ring, Ring]:
    return Ring(0, records), Ring(1, records)


def found(one: Ring, other: Ring):  # type: ignore[no-untyped-def]
    (group,) = one.reader.groups.values()
    return mismatch(group, {0: one.reader, 1: other.reader}, 0, 1)


def test_the_first_number_with_different_digests() -> None:
    assert first_difference({}, {}) is None
    assert first_difference({1: 5, 2: 6}, {3: 7}) is None
    assert first_difference({1: 5, 2: 6}, {2: 6, 3: 7}) is None
    assert first_difference({1: 5, 2: 6, 3: 7, 4: 8}, {2: 6, 3: 1, 4: 2, 5: 3}) == 3


@pytest.mark.parametrize("later", [0, 300, 900])
def test_a_difference_many_calls_ago(later: int) -> None:
    one, other = pair()
    for ring, op in ((one, "sum"), (other, "max")):
        ring.call(times=20)
        ring.call("barrier", 0, times=3, group="elsewhere")
        ring.call(op=op)
        ring.call(times=later)
    assert dict(disagreement(one.reader, other.reader))["world"]
    group = next(group for group in one.reader.groups.values() if group.name == "world")
    finding = mismatch(group, {0: one.reader, 1: other.reader}, 0, 1)
    assert finding is not None
    assert (finding.kind, finding.number, finding.ranks) == (FindingKind.MISMATCH, 21, (0, 1))
    assert "op sum" in finding.text
    assert "op max" in finding.text


def test_a_difference_that_was_overwritten() -> None:
    one, other = pair(64)
    for ring, op in ((one, "sum"), (other, "max")):
        ring.call(times=20)
        ring.call(op=op)
        ring.call(times=200)
    finding = found(one, other)
    assert finding is not None
    assert finding.kind is FindingKind.MISMATCH
    assert finding.ranks == (0, 1)
    assert f"the calls of ranks 0 and 1 differ at or before call {finding.number} of the group" in finding.text
    assert 21 < finding.number < 221
    # Threads that count at once leave digests that say nothing.
    one.recorder.memory.set_word("threads", 2)
    assert found(one, other) is None


@pytest.mark.parametrize(("call", "shown"), [("all_reduce", "all_reduce, by way of broadcast("), ("sync", "sync(")])
def test_calls_of_one_name_are_told_apart_by_their_operations(call: str, shown: str) -> None:
    one, other = pair()
    one.call("all_reduce", 1000)
    other.call("broadcast", 256, dtype="uint8", root=0, call=call)
    finding = found(one, other)
    assert finding is not None
    assert "rank 0 calls all_reduce" in finding.text
    assert f"rank 1 calls {shown}256 elements of uint8, root 0)" in finding.text


def test_calls_that_join_other_tensors() -> None:
    one, other = pair()
    for ring, digest in ((one, 1), (other, 2)):
        ring.call(times=2, joined=3 << 48 | 1)
        ring.call("all_reduce", 8, joined=2 << 48 | digest)
    finding = found(one, other)
    assert finding is not None
    assert finding.number == 3
    assert "differ in the sizes of the tensors" in finding.text
    assert finding.text.count("all_reduce(8 elements of float32 in 2 tensors, op sum)") == 2
    assert len(one.reader.kinds) == 2  # with that of ends: lists of sizes use up no entries


def test_equal_calls() -> None:
    one, other = pair(64)
    for ring in (one, other):
        ring.call(times=100)
        ring.call("all_to_all_single", 3 if ring is one else 4)
        ring.call(times=20)
    assert found(one, other) is None


def test_neighbours() -> None:
    world, few = RingGroup("world", tuple(range(10))), RingGroup("few", (2, 5, 8))
    assert neighbours(2, [world], {0, 1, 3}) == [0, 1, 3]
    assert neighbours(2, [world, few], set(range(10)) - {2}) == [1, 3, 5, 8]
    assert neighbours(2, [world, few], {0, 4, 5, 6, 7}) == [0, 4, 5]
    assert neighbours(2, [], set(range(10)) - {2}) == []


def test_neighbours_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Ring(2, world_size=10)
    own.group()
    view = WorldView(2, 10, own.reader)
    view.local.readers = {rank: Ring(0, 64).reader for rank in range(10) if rank != 2}
    comparison = call_comparison.CallComparison(view, view.own, ())
    asked = []
    monkeypatch.setattr(call_comparison, "neighbours", lambda *given: asked.append(given) or neighbours(*given))
    for _ in range(3):
        assert [rank for rank, _ in comparison._neighbours()] == [1, 3]
    assert len(asked) == 1
    own.recorder.group_index("pair", (2, 7), "", "gloo")
    assert own.reader
    assert [rank for rank, _ in comparison._neighbours()] == [1, 3, 7]
    view.local.readers.pop(3)
    assert [rank for rank, _ in comparison._neighbours()] == [1, 4, 7]


def test_split_sizes_that_native_code_leaves_out_are_not_compared() -> None:
    one, other = pair()
    for ring in (one, other):
        ring.native_call("all_to_all_single", 3 if ring is one else 4)
    assert not diagnose([take_snapshot(ring.reader) for ring in (one, other)])


def test_the_place_of_a_call_is_that_of_any_rank_which_has_one() -> None:
    calls = [Call(1, 1, 1, 2, False, RingGroup("world", (0, 1, 2)), *OPERATION, 4, 1, 0) for _ in range(3)]
    at = {0: calls[0], 1: replace(calls[1], elements=5), 2: replace(calls[2], caller="train.py:7 step")}
    text, culprits = compare_calls(at)
    assert culprits == (1,)
    assert "ranks 0 and 2 call all_reduce(4 elements of float32, op sum) (train.py:7 step); rank 1 calls" in text


@pytest.mark.parametrize(("odd", "ranks"), [({1}, (1,)), ({0}, (0,)), ({2, 3}, (0, 2))])
def test_the_fewer_ranks_that_use_their_groups_in_another_order_are_the_cause(
    odd: set[int], ranks: tuple[int, ...]
) -> None:
    rings = {rank: Ring(rank, world_size=4 if len(odd) == 2 else 3) for rank in range(4 if len(odd) == 2 else 3)}
    for rank, ring in rings.items():
        first, second = ("other", "world") if rank in odd else ("world", "other")
        for name in (first, second):
            ring.group(name)
        kind = ring.recorder.kind(ring.group(first), "all_reduce", "all_reduce", "float32", "sum")
        kind.begin(10, 0, None, None, 0)
    (found,) = [
        one
        for one in diagnose([take_snapshot(ring.reader) for ring in rings.values()])
        if one.kind is FindingKind.ORDER
    ][:1]
    assert found.ranks == ranks
    if len(odd) == 1:
        most = [rank for rank in rings if rank not in odd]
        assert found.text.endswith(f"; ranks {most[0]} and {most[1]} are in the same call")


@pytest.mark.parametrize("several_threads", [(), (1,)])
def test_ranks_that_wait_in_a_circle(several_threads: Sequence[int]) -> None:
    """Ranks 0, 1 and 2 each wait for the next one, and rank 3 for rank 0, which does not belong to the circle."""
    rings = {rank: Ring(rank, world_size=4) for rank in range(4)}
    for rank, members in enumerate(((0, 1), (1, 2), (0, 2), (0, 3))):
        recorder = rings[rank].recorder
        group = recorder.group_index(f"of {members}", members, "", "gloo")
        recorder.kind(group, "all_reduce", "all_reduce", "float32", "sum").begin(10, 0, None, None, 0)
        recorder.memory.set_word("threads", 2 if rank in several_threads else 1)
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    circles = [one for one in diagnose(list(known.values())) if one.kind is FindingKind.ORDER]
    if several_threads:
        assert not circles
        return
    (found,) = circles
    assert found.ranks == (0, 1, 2)
    assert {found.group.name, *(one.name for one in found.other_groups)} == {"of (0, 1)", "of (1, 2)", "of (0, 2)"}
    assert "rank 3" not in found.text
    last = diagnose_group(known, RingGroup("of (0, 3)", (0, 3)))
    assert [(one.kind, one.ranks) for one in last] == [(FindingKind.MISSING, (0,))]


@pytest.mark.parametrize(("comes", "age_ns", "found"), [(False, 0, False), (True, 0, False), (True, 10**10, True)])
def test_ranks_that_wait_for_the_same_root_do_not_wait_for_each_other(comes: bool, age_ns: int, found: bool) -> None:
    """Rank 0 waits for the root, and rank 1 for rank 0, unless the root has come long ago and rank 0 waits on."""
    rings = {rank: Ring(rank, world_size=3) for rank in range(3)}
    rings[0].begin("broadcast", root=2)
    rings[1].begin(group="other")
    if comes:
        rings[2].call("broadcast", root=2)
    snapshots = [take_snapshot(ring.reader) for ring in rings.values()]
    later = [replace(one, taken_ns=one.taken_ns + age_ns) for one in snapshots]
    assert [one.ranks for one in diagnose(later) if one.kind is FindingKind.ORDER][:1] == [(0, 1)] * found


def test_another_group_of_the_same_ranks_is_called_another() -> None:
    """As where a thread of rank 0 has a lock in a call on one group, and another thread needs it to call on the other.

    With several threads, the calls are not said to be in different orders.
    """
    one, other = pair()
    for ring in (one, other):
        for name in ("first", "second"):
            ring.recorder.group_index(name, ring.ranks, "", "gloo")
    one.recorder.memory.set_word("threads", 2)
    one.begin(group="first")
    other.begin(group="second")
    found = diagnose([take_snapshot(one.reader), take_snapshot(other.reader)])
    (text,) = [one.text for one in found if one.ranks == (0,)]
    assert (
        "for which rank 1 waits: it is in all_reduce(4 elements of float32, op sum) on another group of ranks " in text
    )
