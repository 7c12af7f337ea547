"""Loading, intervals and the summary, on traces made by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.trace import files, intervals, tables
from comm_orchestrator.tools.trace.summary import summarize
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait
from comm_utils.observability.traces.file import save

MS = 1_000_000


def call(name: str, begin: int, end: int, number: int = 0, returned: int | None = None, **fields: Any) -> Event:
    """Times in milliseconds; with ``returned`` an asynchronous one."""
    given_ranks = fields.pop("ranks", (0, 1))
    waits = [Wait(a * MS, b * MS) for a, b in fields.pop("waits", ())]
    size = fields.pop("size", 4096)
    operation = Operation(name, name, size, given_ranks, "0", "float32", asynchronous=returned is not None, **fields)
    until = end if returned is None else returned
    return Event(operation, number, begin * MS, end * MS, until * MS, waits)


def job() -> list[RankTrace]:
    """Rank 1 comes 30 ms late to the first of two operations, and hides 15 of the 20 ms of an asynchronous one."""
    first = [call("all_reduce", 0, 50), call("all_gather_into_tensor", 50, 70, 1, 51, waits=[(66, 70)])]
    second = [call("all_reduce", 30, 50), call("all_gather_into_tensor", 50, 70, 1, 55, waits=[(90, 100)])]
    return [RankTrace(0, 2, "a", 1, "gloo", events=first), RankTrace(1, 2, "b", 2, "gloo", events=second)]


def test_a_summary_says_what_happened() -> None:
    found = summarize(job())
    assert (found.world_size, found.backend, found.matched, found.unmatched) == (2, "gloo", 2, 0)
    assert found.wall_s == pytest.approx(0.1)
    reduced, gathered = found.operations
    assert (reduced.name, reduced.calls, reduced.total_bytes, reduced.group) == ("all_reduce", 2, 8192, "world")
    assert reduced.total_s == pytest.approx(0.07)
    assert (reduced.waiting_s, reduced.transfer_s) == (pytest.approx(0.03), pytest.approx(0.04))
    assert (reduced.min_s, reduced.median_s, reduced.max_s) == (0.02, 0.02, 0.05)
    assert reduced.algbw_gb_per_s == pytest.approx(4096 / 0.02 / 1e9)
    assert reduced.hidden_share is None
    assert gathered.asynchronous == 2
    # 15 ms of 20 until the wait; 15 of 20 until it was complete, which nobody waited for.
    assert gathered.hidden_share == pytest.approx(30 / 40)
    assert [row.blocked_s for row in found.ranks] == [pytest.approx(0.055), pytest.approx(0.035)]
    assert [row.blocked_share for row in found.ranks] == [pytest.approx(0.55), pytest.approx(0.35)]
    assert [row.progress_share for row in found.ranks] == [pytest.approx(0.7), pytest.approx(0.4)]
    (late,) = found.stragglers
    assert (late.rank, late.host, late.last, late.caused_s) == (1, "b", 1, pytest.approx(0.03))


def test_calls_with_a_method_have_rows_of_their_own() -> None:
    traces = [
        RankTrace(
            rank,
            2,
            "a",
            rank,
            "gloo",
            events=[
                call("all_reduce", 0, 10),
                call("all_reduce", 20, 22, 1, method="int8(block_size=256)", wire_bytes=1100),
                call("all_reduce", 30, 33, 2, method="int8(block_size=256)", wire_bytes=1100),
            ],
        )
        for rank in range(2)
    ]
    found = summarize(traces)
    rows = [(row.method, row.calls, row.wire_bytes) for row in found.operations]
    assert rows == [("", 2, 0), ("int8(block_size=256)", 4, 4400)]
    assert found.to_json()["operations"][1]["method"] == "int8(block_size=256)"
    assert "all_reduce as int8(block_size=256)" in tables.format_summary(found, io.StringIO())


def test_a_summary_is_for_people_and_for_programs() -> None:
    found = summarize(job())
    text = tables.format_summary(found, io.StringIO())
    for wanted in ("2 ranks on gloo", "all_reduce", "4 KiB", "43%", "57%", "75%", "rank 1", "1 of 2"):
        assert wanted in text
    assert "of the calls" not in text
    document = json.loads(json.dumps(found.to_json()))
    assert document["operations"][0]["waiting_s"] == pytest.approx(0.03)


def test_what_is_missing_is_said() -> None:
    traces = job()
    traces[1] = replace(traces[1], events=traces[1].events[:1], complete=False, dropped=3)
    text = tables.format_summary(summarize(traces), io.StringIO())
    assert "the record of a rank is missing for 1 of the calls" in text
    assert "3 events were dropped while recording, on rank 1" in text
    assert "the recording of rank 1 was cut off" in text


def test_a_trace_without_events_has_a_summary() -> None:
    found = summarize([RankTrace(0, 1)])
    assert (found.wall_s, found.operations, found.stragglers) == (0, [], [])
    assert "0.000 s" in tables.format_summary(found, io.StringIO())


def test_long_tables_are_cut_for_people_only() -> None:
    events = [call("all_reduce", n, n + 1, n, ranks=(0,), size=4 * n) for n in range(60)]
    found = summarize([RankTrace(0, 1, events=events)])
    shown = " ".join(tables.format_summary(found, io.StringIO()).split())  # however wide the terminal is
    assert "20 more: --json has all" in shown
    assert len(found.to_json()["operations"]) == 60


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda one: (one[0], one[0] + one[1]))))
def test_covered_time(found: list[tuple[int, int]]) -> None:
    assert intervals.covered_ns(found) == len({tick for begin, end in found for tick in range(begin, end)})


def test_hidden_time_ends_with_the_operation_or_the_wait() -> None:
    assert intervals.hidden_ns(call("all_reduce", 0, 20, returned=5)) == 15 * MS
    assert intervals.hidden_ns(call("all_reduce", 0, 20, returned=5, waits=[(8, 20), (30, 31)])) == 3 * MS
    assert intervals.hidden_ns(call("all_reduce", 0, 20, returned=25, waits=[(26, 27)])) == 0


def test_a_trace_that_was_saved_is_read_aligned(tmp_path: Path) -> None:
    first, second = job()
    save(tmp_path, first)
    shifted = [
        replace(
            event,
            begin_ns=event.begin_ns + 7 * MS,
            end_ns=event.end_ns + 7 * MS,
            returned_ns=event.returned_ns + 7 * MS,
            waits=[Wait(wait.begin_ns + 7 * MS, wait.end_ns + 7 * MS) for wait in event.waits],
        )
        for event in second.events
    ]
    save(tmp_path, replace(second, offset_ns=7 * MS, events=shifted))
    found = files.read(tmp_path)
    assert found[1].events == second.events
    assert summarize(found).operations == summarize(job()).operations


Change = Callable[[Event], Event]


def changed(**fields: Any) -> Change:
    return lambda event: replace(event, operation=replace(event.operation, **fields))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (changed(operation="all_refuse"), "unknown to this version"),
        (changed(size_bytes=-1), "expected whole numbers, a size of at least 0"),
        (changed(ranks=(1,)), "0 among them"),
        (changed(ranks=(0, 7)), "below 2"),
        (changed(ranks=(0, 0)), "different ranks"),
        (changed(root=5), "root: got 5"),
        (changed(operation="broadcast"), "root: missing"),
        (changed(input_splits=(1, 2, 3)), "splits"),
        (changed(input_splits=(-1, 2)), "negative"),
        (changed(dtype=7), "expected texts"),
        (lambda event: replace(event, end_ns=event.begin_ns - 1), "ends before it begins"),
        (lambda event: replace(event, begin_ns=0.5), "whole numbers"),
        (lambda event: replace(event, waits=[Wait(5, 4)]), "ends after it begins"),
    ],
)
def test_what_contradicts_itself_is_refused(change: Change, expected: str) -> None:
    trace = job()[0]
    files.check(trace, "here")
    trace.events[0] = change(trace.events[0])
    with pytest.raises(ArgumentError, match=expected) as caught:
        files.check(trace, "here")
    assert str(caught.value).startswith("here: ")


def test_folders_that_are_no_traces(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for folder, expected in (
        (file, "got a file"),
        (tmp_path / "no", "there is no such folder"),
        (tmp_path, "no trace here"),
    ):
        with pytest.raises(ArgumentError, match=expected):
            files.read(folder)
    (tmp_path / "rank0.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="not a trace"):
        files.read(tmp_path)
    (tmp_path / "rank0.jsonl").write_text('{"format": "comm-trace"}\n')
    with pytest.raises(ArgumentError):
        files.read(tmp_path)
    save(tmp_path, RankTrace(0, 1))
    (tmp_path / "rank0.jsonl").write_text((tmp_path / "rank0.jsonl").read_text().replace('"rank":0', '"rank":3'))
    with pytest.raises(ArgumentError, match="expected that of rank 0"):
        files.read(tmp_path)
