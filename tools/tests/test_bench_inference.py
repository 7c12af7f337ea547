"""What nox -s bench-inference makes of its measurements: times of a round, targets, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from inference import cli, report, results, variants  # noqa: E402
from inference.results import Results, Round, Target  # noqa: E402
from peers.report import rewrite  # noqa: E402

OURS, OTHER = "AutoTP, ours", "AutoTP, DeepSpeed's operator"


def one_round(communication_us: float = 100.0, tokens_per_s: float = 30.0) -> Round:
    return Round(80.0, tokens_per_s, communication_us, communication_us / 2, 0.05)


def measured(ours_us: list[float], other_us: list[float]) -> Results:
    found = Results()
    for own, its in zip(ours_us, other_us, strict=True):
        found.add(OURS, one_round(own))
        found.add(OTHER, one_round(its))
    return found


def test_the_slower_rank_counts_and_the_first_token_is_apart() -> None:
    answers = [
        {"token_ns": [9_000_000, 2_000_000, 1_000_000], "inside_ns": [[7, 7], [400_000, 0], [100_000, 100_000]]},
        {"token_ns": [5_000_000, 1_000_000, 3_000_000], "inside_ns": [[7, 7], [0, 200_000], [300_000, 300_000]]},
    ]
    for one in answers:
        one["ends_ns"] = one["inside_ns"]
    found = Round.of(answers)
    assert found.first_ms == 9.0
    assert found.tokens_per_s == pytest.approx(2 / 5e-3)
    # The mean over the ranks is 300 µs for one token and 400 for the other.
    assert found.communication_us == pytest.approx(350.0)
    assert found.share == pytest.approx((0.3 / 2 + 0.4 / 3) / 2)


def test_the_wait_for_the_other_rank_is_left_out_of_the_time_together() -> None:
    # Rank 1 calls at 70 µs, rank 0 has been there since 0; rank 1 leaves at 80 and rank 0, which slept, at 85.
    inside, ends = [[[1], [85_000]], [[1], [10_000]]], [[[1], [85_000]], [[1], [80_000]]]
    pairs = zip(inside, ends, strict=True)
    found = Round.of([{"token_ns": [1, 1], "inside_ns": one, "ends_ns": other} for one, other in pairs])
    assert found.communication_us == pytest.approx((85 + 10) / 2)
    assert found.together_us == pytest.approx(15.0)


def test_one_process_has_no_communication() -> None:
    found = Round.of([{"token_ns": [2_000, 1_000], "inside_ns": [[], []], "ends_ns": [[], []]}])
    assert (found.communication_us, found.together_us, found.share) == (0.0, 0.0, 0.0)


def test_the_interval_has_to_be_on_the_right_side() -> None:
    target = Target("", OURS, OTHER, "communication_us", most=0.6)
    assert target.judge(measured([50.0] * 7, [100.0] * 7)).met
    unsteady = target.judge(measured([30.0, 40.0, 50.0, 55.0, 70.0, 80.0, 90.0], [100.0] * 7))
    assert unsteady.ratio == pytest.approx(0.55)
    assert unsteady.met is False
    assert unsteady.lower is not None
    assert unsteady.upper is not None
    assert unsteady.lower < 0.55 < 0.6 < unsteady.upper


def test_equal_is_not_below_and_not_above() -> None:
    found = measured([100.0] * 7, [100.0] * 7)
    assert Target("", OURS, OTHER, "tokens_per_s", least=1.01, may_be_equal=True).judge(found).met is False
    for row, steady in (("a", [9.9] * 7), ("b", [8.0, 9.0, 9.5, 9.9, 10.5, 11.0, 12.0])):
        for one in steady:
            found.add(row, one_round(tokens_per_s=one))
            found.add(f"beside {row}", one_round(tokens_per_s=10.0))
    below = Target("", "a", "beside a", "tokens_per_s", least=1.0, may_be_equal=True)
    assert below.judge(found).met is False
    equal = Target("", "b", "beside b", "tokens_per_s", least=1.0, may_be_equal=True)
    assert equal.judge(found).met
    above = Target("", "b", "beside b", "tokens_per_s", least=1.0)
    assert above.judge(found).met is False


def test_a_target_without_measurements_is_neither_met_nor_missed() -> None:
    verdict = results.TARGETS[0].judge(Results())
    assert verdict.met is None
    assert "not measured" in results.describe(verdict)
    assert "not measured" in report.targets_table([verdict]).markdown()


def test_every_target_is_for_variants_that_there_are() -> None:
    for target in results.TARGETS:
        assert {target.row, target.peer} <= set(variants.VARIANTS), target.text
        assert (target.most is None) != (target.least is None), target.text


def test_the_table_has_a_dash_where_nothing_is_communicated() -> None:
    found = measured([1234.0] * 4, [99.96] * 4)
    found.add(variants.ALONE.name, Round(1.0, 2.0, 0.0, 0.0, 0.0))
    lines = {line[0]: line[1:] for line in report.table(found, "").lines}
    assert lines[OURS][2] == "1,234 (1,234 to 1,234)"
    assert lines[OURS][4] == "5.00 (5.00 to 5.00)"
    assert lines[variants.ALONE.name] == ["2.00 (2.00 to 2.00)", "1.00 (1.00 to 1.00)", "-", "-", "-"]
    assert json.loads(json.dumps(found.to_json()))[OURS]["medians"]["communication_us"] == [1234.0] * 3


def test_other_tokens_or_logits_end_a_run_in_float32_only() -> None:
    exact = cli.options_from(["--tokens", "4"])
    cli.check(OURS, [{"off": 1e-6, "same": 4}], Results(), exact)
    for wrong in ({"off": 1e-6, "same": 3}, {"off": 1e-3, "same": 4}, {"off": float("nan"), "same": 4}):
        with pytest.raises(SystemExit, match="tokens like one process"):
            cli.check(OURS, [wrong], Results(), exact)
    found = Results()
    for same in (3, 2):
        cli.check(OURS, [{"off": 1e-2, "same": same}], found, cli.options_from(["--dtype", "bfloat16"]))
    assert (found.same, found.off) == ({OURS: 2}, {OURS: 1e-2})


def test_defaults_of_a_quick_run_and_refused_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert (cli.options_from([]).rounds, cli.options_from([]).tokens) == (7, 32)
    assert (cli.options_from(["--quick"]).rounds, cli.options_from(["--quick"]).tokens) == (3, 8)
    with pytest.raises(SystemExit):
        cli.options_from(["--tokens", "1"])
    assert "--tokens: got 1, expected at least 2" in capsys.readouterr().err


def test_the_page_has_the_marks_of_this_program(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "inference.md").read_text())
    rewrite(page, "A machine", "its figures", report.BEGIN)
    assert "\n### A machine\n\nits figures\n" in page.read_text()
    assert page.read_text().partition(report.BEGIN)[0] == cli.PAGE.read_text().partition(report.BEGIN)[0]
