"""What nox -s bench-peers makes of its measurements: whether a target was met, and the page."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import cli, report, results, tasks  # noqa: E402
from peers.placement import Placements, round_trip  # noqa: E402
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


def noisy(ours_us: list[float], peer_us: list[float]) -> Results:
    found = Results()
    for own, its in zip(ours_us, peer_us, strict=True):
        found.add(SMALL, "ours", [own])
        found.add(SMALL, "MPICH", [its])
    return found


def test_the_lower_end_of_the_interval_counts() -> None:
    steady = noisy([1.0] * 7, [1.1] * 7)
    assert steady.lower_ratio(SMALL, "ours", "MPICH") == pytest.approx(1.1)
    unsteady = noisy([0.7, 0.9, 1.0, 1.0, 1.1, 1.5, 1.6], [1.1] * 7)
    lower = unsteady.lower_ratio(SMALL, "ours", "MPICH")
    assert lower is not None
    assert 0.65 < lower < 1.0 < 1.1 / 1.0
    target = Target("", "ours", results.PEERS, 1, (SMALL,))
    assert target.judge(steady).met
    assert target.judge(unsteady).met is False
    assert target.judge(unsteady).to_json()["lower"] == lower


def test_a_mean_weighs_all_sizes_alike(measured: Results) -> None:
    verdict = results.MeanTarget("", "ours", results.PEERS, 1, (SMALL, LARGE)).judge(measured)
    assert verdict.lower == pytest.approx((2.0 * 10 / 9) ** 0.5)
    assert verdict.met
    assert verdict.measured == 2


def test_the_time_of_a_cell_is_the_median_of_the_rounds_like_its_ratio_and_interval() -> None:
    found = Results()
    for own, its in (([1.0, 1.0, 1.0], [3.0]), ([2.0, 3.0, 3.0], [4.5]), ([2.0, 3.0, 3.0], [3.3]), ([3.5], [3.0])):
        found.add(SMALL, "ours", own)
        found.add(SMALL, "MPICH", its)
    assert found.median_us(SMALL, "ours") == 3.0
    assert {one["row"]: one["median_us"] for one in found.to_json()} == pytest.approx({"ours": 3.0, "MPICH": 3.15})
    (table,) = report.tables(found)
    assert table.lines[0][-1].startswith("1.05 (")
    lower = found.lower_ratio(SMALL, "ours", "MPICH")
    assert lower is not None
    assert lower <= 1.05


def test_there_is_no_interval_of_three_rounds() -> None:
    found = noisy([1.0, 1.1, 1.2], [2.0, 2.0, 2.0])
    assert found.lower_ratio(SMALL, "ours", "MPICH") is None
    assert Target("", "ours", results.PEERS, 1, (SMALL,)).judge(found).lower == pytest.approx(2 / 1.1)
    assert report.tables(found)[0].lines[0][-1] == "1.82 MPICH"
    assert "without their 95 % interval" in cli.intervals(3)
    assert "in brackets" in cli.intervals(4)


def test_the_lower_end_of_a_mean_counts() -> None:
    unsteady = noisy([0.7, 0.9, 1.0, 1.0, 1.1, 1.5, 1.6], [1.1] * 7)
    verdict = results.MeanTarget("", "ours", results.PEERS, 1, (SMALL,)).judge(unsteady)
    assert verdict.got_us == pytest.approx(1.0 / 1.1)
    assert verdict.lower == unsteady.lower_ratio(SMALL, "ours", "MPICH")
    assert verdict.met is False


def test_hot_and_fresh_are_tasks_of_their_own() -> None:
    assert {task.memory for task in tasks.work(2, None)} == set(tasks.MEMORIES)
    assert {task.memory for task in tasks.work(4, None, ("fresh",))} == {"fresh"}
    for size in tasks.SIZES_BYTES:
        fresh = tasks.Block.of(Task(2, "all_reduce", size, memory="fresh"), first=True, quick=False, slow=False)
        assert fresh.calls == 1, "its owner rewrites the input before each call"
        hot = tasks.Block.of(Task(2, "all_reduce", size), first=True, quick=False, slow=False)
        assert hot.calls > 1
        assert tasks.Block.from_json(fresh.to_json()) == fresh


def test_rows_of_one_peer_are_side_by_side_and_a_gap_is_a_dash(measured: Results) -> None:
    (table,) = report.tables(measured)
    assert table.head == ["size", "ours", "MPICH", "Intel MPI", "Intel MPI, persistent", "gloo", "fastest peer / ours"]
    assert table.lines[0] == ["64 B", "1.00 (0.50)", "2.00 (2.00)", "-", "-", "100.0 (100.0)", "2.00 MPICH"]
    assert table.lines[1][-1] == "1.11 Intel MPI"


def test_only_the_marked_part_of_the_page_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance-peers.md").read_text())
    before = page.read_text()
    for text in ("first \\1", "second"):
        report.rewrite(page, "A machine", text)
        assert f"\n### A machine\n\n{text}\n" in page.read_text()
        report.rewrite(page, "Another", "its own")
    assert page.read_text().partition(report.BEGIN)[0] == before.partition(report.BEGIN)[0]
    assert "first" not in page.read_text().partition(report.BEGIN)[2]
    assert page.read_text().count("### A machine") == page.read_text().count("### Another") == 1
    for line in before.partition(report.BEGIN)[2].splitlines():
        assert line in page.read_text(), "other machines keep theirs"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no lines"):
        report.rewrite(page, "A machine", "")


def test_equal_times_of_ours_are_both_seen_in_the_plot(
    measured: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    measured.add(SMALL, "ours, inference", [1.0, 0.5, 7.0])
    measured.add(LARGE, "ours, inference", [9.0])
    report.draw(measured, tmp_path / "it.svg")
    lines = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    ours, below = lines["ours"], lines["ours, inference"]
    assert below.get_zorder() < ours.get_zorder()
    assert below.get_linewidth() > ours.get_linewidth() + 1
    assert below.get_markersize() > ours.get_markersize() + 1


def test_placements_are_told_apart_by_round_trips() -> None:
    placements = Placements()
    near, far = placements.find(118.0), placements.find(540.0)
    assert [placements.find(one) for one in (170.0, 90.0, 400.0, 700.0)] == [near, near, far, far]
    assert placements.find(54.0) == 54.0, "two hardware threads of one core are neither"
    placements.of[near].add(SMALL.by("shared"), "ours", [1.0])
    assert placements.blocks(near, SMALL, "ours, shared") == 1
    assert placements.blocks(far, SMALL, "ours, shared") == placements.blocks(near, SMALL, "ours") == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a round trip takes two cores")
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_round_trip_is_measured() -> None:
    # A system call alone takes longer than the shortest, and no core is a millisecond away.
    assert 5 < min(round_trip_ns() for round_trip_ns in [round_trip()] * 5) < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0"], "argument --rounds: got '0', expected a number of at least 1"),
        (["--rounds", "x"], "argument --rounds: got 'x', expected a number of at least 1"),
        (["--json", "{folder}/none/x.json"], "argument --json: cannot write {folder}/none/x.json: name a file in a"),
        (["--json", "{folder}"], "argument --json: cannot write {folder}: name a file in a"),
    ],
)
def test_wrong_options_are_refused_before_the_measurement(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.options_from([one.format(folder=tmp_path) for one in arguments])
    assert text.format(folder=tmp_path) in capsys.readouterr().err


def test_an_operation_that_has_none_of_the_sizes_is_named() -> None:
    options, notes = cli.options_from(["--operations", "broadcast", "--sizes", "2048"]), list[str]()
    assert cli.chosen(options, 2, notes.append) == []
    assert notes == ["broadcast, 2 ranks: not measured, as it has none of the sizes"]
    with pytest.raises(SystemExit, match="nothing was measured"):
        cli.by_placement(options, notes.append)
