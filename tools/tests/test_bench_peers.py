"""What nox -s bench-peers makes of its measurements: whether a target was met, and the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import report, results, tasks  # noqa: E402
from peers.results import Results, Target  # noqa: E402
from peers.tasks import Task  # noqa: E402

SMALL, LARGE = Task(2, "all_reduce", 64), Task(2, "all_reduce", 1024)


@pytest.fixture
def measured() -> Results:
    """Ours takes 1 and 9 µs, the fastest peers 2 and 10, and gloo, at one size, 100."""
    found = Results()
    found.add(SMALL, "ours", [1.0, 0.5, 7.0])
    found.add(SMALL, "MPICH", [2.0])
    found.add(SMALL, "gloo", [100.0])
    found.add(LARGE, "ours", [9.0])
    found.add(LARGE, "MPICH", [11.0])
    found.add(LARGE, "Intel MPI", [10.0])
    found.add(LARGE.by("persistent"), "Intel MPI", [0.1])
    return found


def test_a_target_is_judged_where_it_is_hardest(measured: Results) -> None:
    verdict = Target("", "ours", results.PEERS, 1, (SMALL, LARGE)).judge(measured)
    assert (verdict.task, verdict.got_us, verdict.bound_us, verdict.beside) == (LARGE, 9.0, 10.0, "Intel MPI")
    assert verdict.met
    assert Target("", "ours", results.PEERS, 0.8, (SMALL, LARGE)).judge(measured).met is False


def test_a_target_in_microseconds_needs_no_peer(measured: Results) -> None:
    assert Target("", "ours", (), 0, (SMALL,), 1.0).judge(measured).met
    assert not Target("", "ours", (), 0, (SMALL,), 0.9).judge(measured).met


def test_what_was_measured_in_part_is_said(measured: Results) -> None:
    verdict = Target("", "ours", ("gloo",), 0.025, (SMALL, LARGE)).judge(measured)
    assert verdict.met
    assert "met at the sizes measured" in results.describe(verdict)


def test_a_target_without_measurements_is_neither_met_nor_missed() -> None:
    verdict = results.TARGETS[0].judge(Results())
    assert verdict.met is None
    assert "not measured" in results.describe(verdict)


def test_every_target_is_for_something_that_is_measured() -> None:
    measured = {task for ranks in (2, 4) for task in tasks.work(ranks, None)}
    for target in results.TARGETS:
        assert target.tasks, target.text
        assert measured.issuperset(target.tasks), target.text


def test_rows_of_one_peer_are_side_by_side_and_a_gap_is_a_dash(measured: Results) -> None:
    (table,) = report.tables(measured)
    assert table.head == ["size", "ours", "MPICH", "Intel MPI", "Intel MPI, persistent", "gloo", "fastest peer / ours"]
    assert table.lines[0] == ["64 B", "1.00 (0.50)", "2.00 (2.00)", "-", "-", "100.0 (100.0)", "2.00 MPICH"]
    assert table.lines[1][-1] == "1.11 Intel MPI"


def test_only_the_marked_part_of_the_page_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance-peers.md").read_text())
    before = page.read_text()
    for text in ("one \\1", "two"):
        report.rewrite(page, text)
        assert f"\n{text}\n" in page.read_text()
    assert page.read_text().partition(report.BEGIN)[0] == before.partition(report.BEGIN)[0]
    assert "one" not in page.read_text().partition(report.BEGIN)[2]
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no lines"):
        report.rewrite(page, "")
