"""Tables on a terminal of 80 columns: nothing is wider, and no number or path is broken."""

from __future__ import annotations

import io
import re

import pytest

from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.rendering import render as render_report
from comm_orchestrator.tools.doctor.report import RankReport, Report
from comm_orchestrator.tools.trace.summary import OperationRow, RankRow, Summary
from comm_orchestrator.tools.trace.tables import format_summary, significant


@pytest.fixture(autouse=True)
def _80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(("value", "text"), [(0.00123456, "0.00123"), (12.345, "12.3"), (123456.7, "123457"), (0, "0")])
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_findings_and_their_remedies() -> None:
    path = "/etc/security/limits.d/comm.conf"
    findings = [
        Finding("problem", "shared_memory", f"the limits of {path} do not suffice for the ranks", f"correct {path}"),
        Finding("ok", "open_files", "1048576 open files allowed, 1048576 at most"),
    ]
    backends = {"gloo": {"usable": False, "reason": "built without it, so it cannot be used", "remedy": "see path"}}
    report = Report(True, 1, findings, [RankReport(0, 1, "host", 7, backends=backends)], [], [])
    shown = render_report(report, io.StringIO(), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count(path) == 2
    assert f"-> correct {path}" in shown
    assert "-> see path" in shown
    assert "shared_memory" in shown
    wide = render_report(report, io.StringIO(), 200)
    assert "->" not in wide


def test_a_summary_of_long_names_and_large_numbers() -> None:
    names = ("reduce_scatter_tensor", "all_gather_into_tensor", "inference_all_reduce")
    operations = [
        OperationRow(
            name, name, 2**26, "world", (0, 1), "", 123456, 2**40, 123.456, 1.2e-3, 2.345e-3, 0.0345, 0.456,
            100.0, 40.0, 60.0, 123456, 0.55, 0.00321, 0.00642,
        )
        for name in names
    ]  # fmt: skip
    ranks = [RankRow(rank, "node-with-a-name", 123456, 370368, 99.5, 0.9, 0.95, 40.1, 1e-5, 0, True) for rank in (0, 1)]
    shown = re.sub(
        r"\x1b\[[0-9;]*m", "", format_summary(Summary(2, "gloo", "", 130.0, 3, 0, operations, ranks, []), _Terminal())
    )
    assert max(map(len, shown.splitlines())) <= 80
    words = shown.split()
    for number in ("123456", "2345", "34500", "0.00321", "0.00642", "370368"):
        assert number in words


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
