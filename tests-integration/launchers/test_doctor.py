"""``commctl doctor`` under launchers: one report for all ranks, from rank 0."""

from __future__ import annotations

import json
import sys

import pytest

from launchers.launcher import Launcher


@pytest.mark.parametrize("launcher", ["impi-rt", "srun", "torchrun-two-hosts"], indirect=True)
def test_one_report_for_all_ranks(launcher: Launcher) -> None:
    program = [sys.executable, "-m", "comm_orchestrator", "doctor", "--json", "--timeout", "60"]
    finished = launcher.run(program, 2)
    assert all(one.returncode == 0 for one in finished), "\n\n".join(map(str, finished))
    (report,) = [json.loads(one.stdout) for one in finished if one.stdout.strip()]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert not [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert any(finding["check"] == "communication" for finding in report["findings"])
