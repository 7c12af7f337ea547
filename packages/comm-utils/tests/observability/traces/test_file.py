"""Trace files: what was written is read, a file that was cut off too, and what is no trace is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait
from comm_utils.observability.traces.file import load, load_rank, remove_beyond, save

TIMES = st.integers(0, 2**62)
OPERATIONS = st.builds(
    Operation,
    name=st.text(max_size=8),
    operation=st.sampled_from(["all_reduce", "send", "all_to_all_single"]),
    size_bytes=st.integers(0, 2**40),
    ranks=st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple),
    group=st.text(max_size=4),
    dtype=st.sampled_from(["float32", ""]),
    op=st.sampled_from(["", "sum"]),
    root=st.integers(-1, 9),
    tag=st.integers(0, 9),
    asynchronous=st.booleans(),
    input_splits=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@st.composite
def traces(draw: st.DrawFn) -> RankTrace:
    events = []
    for begin in sorted(draw(st.lists(TIMES, unique=True, max_size=8))):
        operation = draw(OPERATIONS)
        end = begin + draw(st.integers(0, 10**9))
        waits = [Wait(*draw(st.tuples(TIMES, TIMES)))] if operation.asynchronous and draw(st.booleans()) else []
        returned = draw(TIMES) if operation.asynchronous else end
        events.append(Event(operation, draw(st.integers(-1, 99)), begin, end, returned, waits))
    return RankTrace(
        rank=0,
        world_size=1,
        host=draw(st.text(max_size=8)),
        offset_ns=draw(st.integers(-(2**60), 2**60)),
        drift=draw(st.floats(-1, 1)),
        dropped=draw(st.integers(0, 9)),
        events=events,
    )


@settings(max_examples=50)
@given(traces())
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, trace: RankTrace) -> None:
    folder = tmp_path_factory.mktemp("trace")
    save(folder, trace)
    assert load(folder) == [trace]


def some(rank: int, world_size: int = 2) -> RankTrace:
    operation = Operation("all_reduce", "all_reduce", 8, tuple(range(world_size)), "0", "float32", "sum")
    events = [Event(operation, number, 100 * number, 100 * number + 50, 100 * number + 50) for number in range(3)]
    return RankTrace(rank, world_size, "node01", 4711, events=events)


def test_a_file_that_was_cut_off_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path, some(0))
    whole = path.read_bytes()
    first_line = whole.index(b"\n") + 1
    seen = set()
    for length in range(first_line, len(whole)):
        path.write_bytes(whole[:length])
        trace = load_rank(path)
        assert trace.events == some(0).events[: len(trace.events)]
        assert trace.complete == (length >= len(whole) - 1)
        seen.add(len(trace.events))
    assert seen == {0, 1, 2, 3}


def test_a_wait_may_come_before_its_operation(tmp_path: Path) -> None:
    """The library's thread may tell of the end after somebody's wait has been written."""
    operation = Operation("all_reduce", "all_reduce", 8, (0,), asynchronous=True)
    path = save(tmp_path, RankTrace(0, 1, events=[Event(operation, 0, 5, 20, 6, [Wait(7, 21)])]))
    lines = path.read_text().splitlines()
    assert lines[2:4] == ["[0, 0, 5, 20, 6]", "[5, 7, 21]"]
    lines[2:4] = lines[3], lines[2]
    path.write_text("\n".join(lines))
    assert load_rank(path).events[0].waits == [Wait(7, 21)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a trace"),
        ("hello\n", "not a trace"),
        ("[1, 2]\n", "not a trace"),
        ('{"format": "something"}\n', "not a trace"),
        (
            '{"format": "comm-trace", "version": 99}\n',
            "got version 99 of the format, expected 1; read it with the release",
        ),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        load(tmp_path)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match=r"not a trace: .*can't decode"):
        load(tmp_path)


@pytest.mark.parametrize(
    "line", ["[9, 0, 1, 2]", "[0, 1]", "[]", "{}", "null", "[0, 1, 2, 3, 4, 5, 6]", '{"number": 3}']
)
def test_a_line_that_is_none(tmp_path: Path, line: str) -> None:
    path = save(tmp_path, some(0))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ArgumentError, match="line 7: not a line of a trace"):
        load_rank(path)


def test_folders_without_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no trace here"):
        load(tmp_path)
    save(tmp_path, some(1, 4))
    save(tmp_path, some(3, 4))
    with pytest.raises(ArgumentError, match=r"got 2 of 4 ranks' files; missing: rank0.jsonl, rank2.jsonl; each host"):
        load(tmp_path)
    save(tmp_path, some(0, 2))
    with pytest.raises(ArgumentError, match="several jobs, of 2, 4 ranks"):
        load(tmp_path)


def test_files_of_several_jobs_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path, replace(some(0), job="a"))
    save(tmp_path, replace(some(1), job="b"))
    with pytest.raises(ArgumentError, match="the files of ranks 0 and 1 are of different jobs"):
        load(tmp_path)
    save(tmp_path, replace(some(1), job="a"))
    assert len(load(tmp_path)) == 2


def test_files_of_a_larger_world_go(tmp_path: Path) -> None:
    for rank in range(4):
        save(tmp_path, some(rank, 4))
    (tmp_path / "rank9.jsonl.old").touch()
    remove_beyond(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "rank9.jsonl.old"]
