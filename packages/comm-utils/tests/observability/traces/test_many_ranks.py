"""The time for a trace grows with its events, and waiting is what comparing every pair of ranks gives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.alignment import aligned, is_nothing, matches
from comm_utils.observability.traces.file import load, save
from comm_utils.observability.traces.waiting import account, split

ROOTED = ("broadcast", "reduce", "gather", "scatter")
NAMES = ("all_reduce", "all_to_all_single", "barrier", *ROOTED, "isend", "irecv")


def operation(name: str, ranks: tuple[int, ...], root: int = -1, size: int = 8) -> Operation:
    return Operation(name, name, size, ranks, "0", "float32", "sum" if "reduce" in name else "", root)


def pair_by_pair(calls: Mapping[int, Event], doubt_ns: int) -> dict[int, tuple[int, int]]:
    """As :func:`split`, each rank compared with each that it needs."""
    found = {}
    for rank, event in calls.items():
        what = event.operation
        needed = what.pattern.sources(rank, what.ranks, what.root)
        if not needed:
            targets = what.pattern.targets(rank, what.ranks, what.root)
            needed = {one for one in targets if one not in calls or calls[one].begin_ns <= event.end_ns}
        needed = {rank} if is_nothing(what) else needed | {rank}
        if not needed <= calls.keys():
            continue
        if all(matches(rank, event, other, calls[other], doubt_ns) for other in needed - {rank}):
            last = max(sorted(needed), key=lambda one: calls[one].begin_ns)
            waiting_ns = max(calls[last].begin_ns - event.begin_ns, 0)
            found[rank] = min(waiting_ns, max(event.duration_ns, 0)), last
    return found


@st.composite
def recorded(draw: st.DrawFn) -> dict[int, Event]:
    """One operation as some ranks of a group recorded it; a few of them may have recorded another."""
    ranks = tuple(draw(st.permutations(range(draw(st.integers(1, 6))))))
    name = draw(st.sampled_from(NAMES))
    root = draw(st.sampled_from(ranks)) if name in (*ROOTED, "isend", "irecv") else -1
    right = operation(name, ranks, root)
    wrong = [operation(name, ranks, root, size=0), operation(draw(st.sampled_from(NAMES)), ranks, ranks[0])]
    calls = {}
    for rank in draw(st.permutations(ranks)):
        begin, lasts = draw(st.integers(0, 60)), draw(st.integers(-1, 80))
        what = draw(st.sampled_from([right] * 9 + wrong))
        if draw(st.integers(0, 11)):
            calls[rank] = Event(what, 0, begin, begin + lasts, begin + lasts)
    return calls


@settings(max_examples=500)
@given(recorded(), st.sampled_from([0, 0, 15]))
def test_waiting_is_as_of_every_pair_of_ranks(calls: dict[int, Event], doubt_ns: int) -> None:
    assert split(calls, doubt_ns) == pair_by_pair(calls, doubt_ns)


def job(ranks: int, name: str, counted_together: bool) -> list[RankTrace]:
    what = operation(name, tuple(range(ranks)), 0 if name in ROOTED else -1)
    traces = []
    for rank in range(ranks):
        begins = [1000 * number + rank % 7 for number in range(5)]
        events = [Event(what, number, begin, begin + 500, begin + 500) for number, begin in enumerate(begins)]
        traces.append(RankTrace(rank, ranks, counted_together=counted_together, events=events))
    return traces


def python_calls(traces: list[RankTrace]) -> int:
    """Return how many functions of Python the analysis of ``traces`` calls."""
    count = 0

    def profile(_frame: object, kind: str, _argument: Any) -> None:
        nonlocal count
        count += kind == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        found = account(aligned(traces))
    finally:
        sys.setprofile(before)
    assert found.operations == 5
    return count


@pytest.mark.parametrize("counted_together", [True, False])
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all_single", "broadcast", "reduce"])
def test_four_times_the_ranks_are_four_times_the_work(name: str, counted_together: bool) -> None:
    few, many = (python_calls(job(ranks, name, counted_together)) for ranks in (16, 64))
    assert many < 5 * few


def test_files_share_the_ranks_of_their_groups(tmp_path: Path) -> None:
    for trace in job(4, "all_reduce", counted_together=True):
        save(tmp_path, trace)
    assert len({id(event.operation.ranks) for trace in load(tmp_path) for event in trace.events}) == 1
