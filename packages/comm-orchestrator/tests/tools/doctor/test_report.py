"""Many ranks, one report: nothing is said twice, and who is meant is named."""

from __future__ import annotations

import io
import json
import threading

import pytest

from comm_collectives.recorded.clocks import Clock
from comm_orchestrator.report import FACTS
from comm_orchestrator.tools.doctor.clocks import judge
from comm_orchestrator.tools.doctor.finding import Finding, from_error, guarded
from comm_orchestrator.tools.doctor.rendering import render
from comm_orchestrator.tools.doctor.report import RankReport, merge_reports
from comm_orchestrator.tools.doctor.time_limit import StuckError, anything_stuck, within
from comm_orchestrator.tools.doctor.trial import Trial
from comm_utils import CommTimeoutError

GLOO = {"usable": True, "reason": "here", "remedy": ""}
NO_NCCL = {"usable": False, "reason": "no GPU", "remedy": "get one"}


def rank_report(rank: int, findings: list[Finding], host: str = "a", size: int = 4, **more: object) -> RankReport:
    launch = {name: {"value": rank, "source": "test"} for name in FACTS}
    values = {"launcher": "test", "packages": {"torch": "2"}, "backends": {"gloo": GLOO}, "launch": launch, **more}
    report = RankReport(rank, size, host, 100 + rank, node_rank=ord(host[0]), findings=findings, **values)  # type: ignore[arg-type]
    assert RankReport.from_plain(report.to_plain()) == report
    return report


def shm(text: str, level: str = "ok", remedy: str = "") -> Finding:
    return Finding(level, "shared_memory", text, remedy, of_host=True)  # type: ignore[arg-type]


def test_a_host_says_things_once_and_its_worst() -> None:
    reports = [
        rank_report(0, [shm("24 MiB free")]),
        rank_report(1, [shm("23 MiB free", "warning", "more")]),
        rank_report(2, [shm("9 GiB free")], "b"),
        rank_report(3, [shm("8 GiB free")], "b"),
    ]
    found = merge_reports(reports, [], []).findings
    assert [(one.level, one.found, one.ranks) for one in found] == [
        ("warning", "23 MiB free", (0, 1)),
        ("ok", "9 GiB free", (2, 3)),
    ]


def test_what_all_ranks_say_names_none_of_them() -> None:
    files = Finding("ok", "open_files", "1024")
    low = Finding("problem", "open_files", "64", "ulimit -n 1024")
    (one,) = merge_reports([rank_report(rank, [files]) for rank in range(4)], [], []).findings
    assert one.ranks == ()
    report = merge_reports([rank_report(rank, [low if rank == 2 else files]) for rank in range(4)], [], [])
    assert [(one.level, one.ranks) for one in report.findings] == [("problem", (2,)), ("ok", (0, 1, 3))]
    assert report.exit_code == 1


def test_ranks_that_failed_are_named() -> None:
    trials = [Trial("gloo", rank, 0.1, 0.001) for rank in range(4)]
    trials += [Trial("nccl", rank, error="timed out", remedy="check the cable") for rank in (1, 3)]
    trials += [Trial("nccl", rank, 0.1, 0.001) for rank in (0, 2)]
    report = merge_reports([rank_report(rank, []) for rank in range(4)], [], trials)
    bad = [one for one in report.findings if one.level == "problem"]
    assert [(one.found, one.ranks, one.remedy) for one in bad] == [("nccl: timed out", (1, 3), "check the cable")]
    text = render(report, io.StringIO(), None)
    assert "ranks 1, 3: nccl: timed out" in text
    assert "gloo: set up in 0.10 s, all_reduce right after 1 ms" in text
    assert text.splitlines()[-1] == "1 problem, no warnings"


def test_differences_between_ranks() -> None:
    reports = [
        rank_report(0, [], backends={"gloo": GLOO, "nccl": GLOO}, packages={"torch": "2", "numpy": "1"}),
        rank_report(1, [], backends={"gloo": GLOO, "nccl": NO_NCCL}, packages={"torch": "2", "numpy": None}, size=2),
    ]
    found = merge_reports([reports[0], *reports[1:]], [], []).findings
    assert [(one.level, one.check) for one in found] == [("warning", "packages"), ("warning", "backends")]
    assert "numpy is 1 on rank 0, and none on rank 1" in found[0].found
    assert (found[1].found, found[1].remedy) == ("nccl cannot be used by rank 1: no GPU", "get one")


def test_one_finding_a_line_where_nobody_looks() -> None:
    long = Finding("warning", "names", "x" * 300, "do " + "y" * 300)
    text = render(merge_reports([rank_report(0, [long], size=1)], [], []), io.StringIO(), None)
    (line,) = [line for line in text.splitlines() if "x" in line and "warning" in line]
    assert "x" * 300 in line
    assert "y" * 300 in line
    assert "\x1b" not in text


def test_brackets_stand_for_themselves() -> None:
    found = rank_report(0, [], "[/a]", 1, packages={"torch": "2 [rocm]"})
    text = render(merge_reports([found], [], []), io.StringIO(), None)
    assert "one host, [/a]" in text
    assert "2 [rocm]" in text


def test_one_rank_alone_says_so() -> None:
    report = merge_reports([rank_report(3, [])], [], [])
    assert not report.complete
    assert render(report, io.StringIO(), None).startswith("rank 3 of 4 on a, alone\n")


def test_json_keys() -> None:
    document = merge_reports([rank_report(0, [shm("fine")], size=1)], [], [Trial("gloo", 0, 0.1, 0.2)]).to_json()
    assert json.loads(json.dumps(document)) == document
    assert list(document) == [
        *("level", "complete", "world_size", "findings", "packages", "torch", "backends", "hosts", "ranks", "clocks"),
        "collectives",
    ]
    assert document["findings"][0] == {
        **{"level": "ok", "check": "shared_memory", "found": "fine", "remedy": ""},
        "ranks": [],
    }


@pytest.mark.parametrize(("offset_s", "level"), [(0.05, "ok"), (0.25, "warning"), (-0.25, "warning")])
def test_clocks(offset_s: float, level: str) -> None:
    (one,) = judge([Clock(0), Clock(1, round(offset_s * 1e9), 400_000), Clock(2, 1_000_000, 100_000_000)])
    assert one.level == level
    assert "± " in one.found
    assert ("timedatectl" in one.remedy) == (level == "warning")
    ahead = "rank 1 is ahead of rank 0" if offset_s > 0 else "rank 2 is ahead of rank 1"
    assert (ahead in one.found) == (level == "warning")


def test_errors_become_findings() -> None:
    error = CommTimeoutError("init_distributed: rank 1 of 2 did not come; check that it was started, and wait")
    one = from_error("communication", error)
    assert (one.found, one.remedy) == ("rank 1 of 2 did not come", "check that it was started, and wait")
    assert from_error("x", KeyError("k")).found == "KeyError: 'k'"
    (one,) = guarded("x", lambda: [1 // 0])  # type: ignore[list-item]
    assert (one.level, one.check, "ZeroDivisionError" in one.found) == ("problem", "x", True)


def test_what_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(StuckError, match=r"waiting did not come back within 0\.05 s"):
        within(0.05, release.wait, "waiting")
    assert anything_stuck()
    release.set()
    assert within(5, lambda: 7, "counting") == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "dividing")
