"""Timelines and maps: few bars, small files, the same every time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.trace import figures, plotting
from comm_orchestrator.tools.trace.files import waiting_of
from comm_orchestrator.tools.trace.lanes import WAITING, Bar, lanes, thinned
from comm_orchestrator.tools.trace.plotting import Wanted
from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait

MS = 1_000_000
LOOKS = [*figures.FAMILIES, WAITING]
PNG = b"\x89PNG\r\n\x1a\n"


def call(
    name: str, begin: float, end: float, number: int = 0, group: str = "0", ranks: Sequence[int] = (0, 1)
) -> Event:
    times = round(begin * MS), round(end * MS)
    operation = Operation(name, name, 4096, tuple(ranks), group, "float32", root=1 if name == "broadcast" else -1)
    return Event(operation, number, *times, times[1])


def later(event: Event, returned: float, wait: tuple[float, float]) -> Event:
    """The same as an asynchronous one."""
    operation = Operation(**{**vars(event.operation), "asynchronous": True})
    waits = [Wait(round(wait[0] * MS), round(wait[1] * MS))]
    return Event(operation, event.sequence, event.begin_ns, event.end_ns, round(returned * MS), waits)


def job() -> list[RankTrace]:
    traces = []
    for rank, late in ((0, 0), (1, 20)):
        events = [
            call("all_reduce", late, 40),
            later(call("all_reduce", 45, 70, 1), 46, (65, 70)),
            later(call("all_gather_into_tensor", 50, 69, 2), 51, (70, 71)),
            call("broadcast", 80, 90, 3),
        ]
        traces.append(RankTrace(rank, 2, "host", rank, "gloo", events=events))
    return traces


def drawn(path: Path) -> str:
    """The text of an SVG, which is one."""
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag.endswith("svg")
    return " ".join(text.strip() for text in root.itertext() if text.strip())


def test_lanes_are_ranks_groups_and_asynchronous_operations_that_overlap() -> None:
    traces = job()
    found = lanes(traces, (0, 1), 0, 90 * MS, waiting_of(traces))
    assert [(lane.rank, lane.track, lane.half) for lane in found] == [
        (rank, "world", half) for rank in (0, 1) for half in (False, True, True)
    ]
    first = found[0].bars
    assert first[0] == Bar(0, 20 * MS, "all_reduce", waiting=True)
    assert first[1] == Bar(20 * MS, 40 * MS, "all_reduce")
    assert [bar for bar in first if bar.look == WAITING] == [
        Bar(65 * MS, 70 * MS, WAITING),
        Bar(70 * MS, 71 * MS, WAITING),
    ]
    assert not [bar for bar in found[3].bars if bar.waiting and bar.look == "all_reduce"]
    clipped = lanes(traces, (1,), 30 * MS, 60 * MS, {})
    assert all(30 * MS <= bar.begin_ns <= bar.end_ns <= 60 * MS for lane in clipped for bar in lane.bars)
    assert {lane.rank for lane in clipped} == {1}


bars = st.builds(
    lambda begin, took, look, waiting: Bar(begin, min(begin + took, 10_000), look, waiting),
    st.integers(0, 9_999),
    st.one_of(st.integers(0, 120), st.integers(0, 4000)),
    st.sampled_from(LOOKS),
    st.booleans(),
)


@given(st.lists(bars, max_size=60), st.integers(1, 200))
def test_thinning_keeps_wide_bars_and_hides_no_time(found: list[Bar], pixels: int) -> None:
    step = 10_000 / pixels
    kept = thinned(found, 0, 10_000, pixels)
    wide = [bar for bar in found if bar.end_ns - bar.begin_ns >= step]
    assert kept[len(kept) - len(wide) :] == wide
    narrow = kept[: len(kept) - len(wide)]
    assert len(narrow) <= pixels + 1
    # Each bar that was too narrow is where one is drawn now, and nothing is drawn elsewhere.
    for bar in found:
        if bar not in wide:
            assert any(one.begin_ns - 1 <= bar.begin_ns <= one.end_ns + 1 for one in narrow)
    for one in narrow:
        assert any(one.begin_ns - 1 <= bar.end_ns and bar.begin_ns <= one.end_ns + 1 for bar in found)
        assert 0.25 <= one.height <= 1
        assert (one.look, one.waiting) in {(bar.look, bar.waiting) for bar in found}


def test_narrow_bars_are_as_high_as_they_fill_the_time() -> None:
    full = [Bar(n * 10, n * 10 + 10, "barrier") for n in range(1000)]
    assert thinned(full, 0, 10_000, 100) == [Bar(0, 10_000, "barrier", height=1.0)]
    half = [Bar(n * 10, n * 10 + 5, "barrier") for n in range(1000)]
    assert thinned(half, 0, 10_000, 100) == [Bar(0, 10_000, "barrier", height=0.5)]


@pytest.mark.parametrize("kind", plotting.KINDS)
def test_a_picture_says_what_it_shows_and_is_the_same_every_time(tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        plotting.plot(job(), path, Wanted(kind))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = drawn(paths[0])
    timeline = ["time since the first call (ms)", "rank 0", "world, async", "all_reduce", "pale: waiting", "half high"]
    traffic = ["from rank", "to rank", "bytes sent (KiB)"]
    for wanted in [*(timeline if kind != "traffic" else []), *(traffic if kind != "timeline" else [])]:
        assert wanted in text
    # 2 all_reduce of 4 KiB send 2 KiB twice each, the all_gather 2 KiB; the broadcast 4 KiB from its root alone.
    if kind != "timeline":
        assert "24 KiB that ranks had to send" in text
        assert "10 KiB" in text
        assert "14 KiB" in text
    plotting.plot(job(), tmp_path / "it.png", Wanted(kind))
    assert (tmp_path / "it.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.png", "one.svg", "two.svg"]


def test_many_events_make_a_small_picture(tmp_path: Path) -> None:
    chosen = random.Random(1)
    traces = [RankTrace(rank, 4) for rank in range(4)]
    names = ("all_reduce", "all_gather_into_tensor", "barrier")
    for number in range(4000):
        at, name = number * 0.05, chosen.choice(names)
        for trace in traces:
            begin = at + chosen.random() * 0.01
            trace.events.append(call(name, begin, at + 0.02 + chosen.random() * 0.02, number, ranks=range(4)))
    path = tmp_path / "many.svg"
    plotting.plot(traces, path, Wanted("timeline"))
    assert path.stat().st_size < 500_000
    shorter = tmp_path / "part.svg"
    plotting.plot(traces, shorter, Wanted("timeline", 0.1, 0.101))
    assert shorter.stat().st_size < 50_000
    assert "time since the first call (µs)" in drawn(shorter)


def test_many_ranks_make_a_picture(tmp_path: Path) -> None:
    world = tuple(range(64))
    traces = [RankTrace(rank, 64, events=[call("all_reduce", rank / 10, 10, ranks=world)]) for rank in world]
    path = tmp_path / "many.svg"
    plotting.plot(traces, path, Wanted())
    assert path.stat().st_size < 200_000
    assert "rank 63" in drawn(path) or "rank 62" in drawn(path)
    plotting.plot(traces, path, Wanted(ranks=(3, 5)))
    text = drawn(path)
    assert "rank 3" in text
    assert "rank 4" not in text


def test_the_least_there_can_be(tmp_path: Path) -> None:
    plotting.plot([RankTrace(0, 1, events=[call("barrier", 1, 1, ranks=(0,))])], tmp_path / "it.svg", Wanted())
    plotting.plot([RankTrace(0, 1, events=[call("barrier", 1, 2, ranks=(0,))])], tmp_path / "it.svg", Wanted())
    with pytest.raises(ArgumentError, match="no operations"):
        plotting.plot([RankTrace(0, 1)], tmp_path / "it.svg", Wanted())


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("it.pdf", Wanted(), "expected .svg or .png"),
        ("it", Wanted(), "expected .svg or .png"),
        ("it.svg", Wanted("lines"), "--kind: got 'lines'"),
        ("it.svg", Wanted(from_s=-1), "--from: got -1"),
        ("it.svg", Wanted(to_s=float("nan")), "--to: got nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(name: str, wanted: Wanted, expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        plotting.check(Path(name), wanted)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(ranks=(2,)), "--ranks: got 2; the trace has the ranks 0 to 1"),
        (Wanted(from_s=0.09), "the trace lasts 0.09 s"),
        (Wanted(from_s=0.05, to_s=0.05), "--to: got 0.05"),
    ],
)
def test_what_a_trace_does_not_have_is_refused(tmp_path: Path, wanted: Wanted, expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        plotting.plot(job(), tmp_path / "it.svg", wanted)
    assert not list(tmp_path.iterdir())


def test_lists_of_ranks() -> None:
    assert plotting.ranks_of("3, 0,5-7") == (0, 3, 5, 6, 7)
    for wrong in ("", "a", "1,", "-1", "3-1", "1-"):
        with pytest.raises(ArgumentError, match="expected ranks such as"):
            plotting.ranks_of(wrong)


def test_every_operation_has_a_colour_of_its_kind() -> None:
    assert {figures.family(name) for name in operations.recorded()} == set(figures.FAMILIES)
    by_color = defaultdict(list)
    for name, color in [*figures.FAMILIES.items(), (WAITING, figures.WAIT)]:
        by_color[color].append(name)
        by_color[figures.pale(color)].append(name)
    assert all(len(names) == 1 for names in by_color.values())


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from comm_orchestrator.tools.commands import app\n"
        f"app(['trace', 'plot', {str(tmp_path)!r}, '-o', 'it.svg'])"
    )
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    wanted = "error: trace plot: needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'\n"
    assert (done.stdout, done.stderr) == ("", wanted)
