"""What nox -s bench-training makes of its measurements: steps, verdicts, memory, hidden communication, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers.report import rewrite  # noqa: E402
from training import cli, report, results, variants  # noqa: E402
from training.overlap import Overlap, overlap_of_events  # noqa: E402
from training.results import Memory, Results, round_ms  # noqa: E402


def measured(ours_ms: list[float], other_ms: list[float], name: str = "ddp") -> Results:
    return Results(rounds={(name, 1.0): (ours_ms, other_ms)}, parameters={1.0: 1_000_000})


def test_the_slower_rank_of_each_step_counts_and_the_median_step_of_a_round() -> None:
    answers = [{"times_ns": [1_000_000, 9_000_000, 2_000_000]}, {"times_ns": [3_000_000, 1_000_000, 1_000_000]}]
    assert round_ms(answers) == 3.0


@pytest.mark.parametrize(
    ("ours_ms", "met"),
    [
        ([9.0, 9.1, 9.2, 9.3, 9.4], "met"),
        ([8.0, 9.0, 9.9, 11.0, 12.0], "within the interval"),
        ([10.1, 10.2, 10.3, 10.4, 10.5], "missed"),
    ],
)
def test_the_verdict_says_where_the_interval_is(ours_ms: list[float], met: str) -> None:
    (verdict,) = measured(ours_ms, [10.0] * 5).verdicts()
    assert verdict.met == met
    assert verdict.lower <= verdict.ratio <= verdict.upper


def test_the_limit_is_that_of_the_comparison() -> None:
    (verdict,) = measured([9.7] * 5, [10.0] * 5, "zero2").verdicts()
    assert (verdict.comparison.most, verdict.met) == (0.95, "missed")


def event(asynchronous: bool, begin: int, returned: int, end: int, *waits: tuple[int, int]) -> Any:
    return SimpleNamespace(
        operation=SimpleNamespace(asynchronous=asynchronous),
        begin_ns=begin,
        returned_ns=returned,
        end_ns=end,
        waits=[SimpleNamespace(begin_ns=one, end_ns=other) for one, other in waits],
    )


def test_communication_is_hidden_from_the_return_of_the_call_until_the_wait_or_the_end() -> None:
    ms = 1_000_000
    waited = event(True, 0, ms, 10 * ms, (4 * ms, 10 * ms))
    complete_before = event(True, 0, 2 * ms, 10 * ms, (12 * ms, 12 * ms))
    synchronous = event(False, 0, 0, 10 * ms)
    found = overlap_of_events([waited, complete_before, synchronous], 2)
    assert found == Overlap(calls=1.5, communication_ms=15.0, hidden_ms=(3 + 8) / 2)
    assert found.share == pytest.approx(11 / 30)
    assert Overlap(0, 0, 0).share == 0.0


def test_a_stage_shares_what_it_partitions() -> None:
    names = [peer.name for peer, *_ in variants.MEMORY]
    of = [[results.expected_bytes(name, ranks) for ranks in (1, 2, 4)] for name in names]
    assert of == [[16, 16, 16], [16, 12, 10], [16, 10, 7], [16, 8, 4]]


def test_tables_show_what_was_measured() -> None:
    found = measured([1234.0] * 4, [99.96] * 4)
    assert [table.title for table in report.tables(found)] == ["Time of a step"]
    found.memory["sharded, stage 3", 1.0, 2] = Memory(8.25, 12.0)
    found.overlap[1.0] = Overlap(3.0, 4.0, 3.0)
    times, memory, overlap = report.tables(found)
    assert times.lines[0][2:] == [
        "1,234 (1,234 to 1,234)",
        "100.0 (100.0 to 100.0)",
        "12.345 (12.345 to 12.345)",
        "1",
        "**missed**",
    ]
    assert memory.lines == [["sharded, stage 3", "2", "8.0", "8.2", "12.0", "7.87", "11.4"]]
    assert overlap.lines == [["1", "3.0", "4.00", "3.00", "75 %"]]
    assert json.loads(json.dumps(found.to_json()))["steps"][0]["parameters"] == 1_000_000


def test_defaults_of_a_quick_run_and_refused_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert (cli.options_from([]).rounds, cli.options_from([]).parameters) == (11, [1.0, 20.0, 100.0])
    assert (cli.options_from(["--quick"]).rounds, cli.options_from(["--quick"]).parameters) == (3, [0.1])
    assert cli.options_from(["--only", "--memory"]).only == []
    for wrong in (["--rounds", "0"], ["--memory", "0"], ["--parameters", "3"]):
        with pytest.raises(SystemExit):
            cli.options_from(wrong)
    said = capsys.readouterr().err
    assert "argument --rounds: got '0', expected a number of at least 1" in said
    assert "--memory: got a number below 1, expected at least 1" in said


def test_the_page_has_the_marks_of_this_program(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(cli.PAGE.read_text())
    rewrite(page, "A machine", "its figures", report.BEGIN)
    assert "\n### A machine\n\nits figures\n" in page.read_text()
