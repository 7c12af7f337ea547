"""Deadlines of tests follow the machine; SIGINT works in tests that a script starts in the background."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from comm_utils.testing import RankPool, patience, run_ranks

INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from comm_utils.testing import allow_interrupts
if sys.argv[1] == "allowed":
    allow_interrupts()
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("how", "said"), [("allowed", "interrupted\n"), ("ignored", "")])
def test_an_ignored_interrupt(how: str, said: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, how]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == said


@pytest.mark.parametrize(("load", "factor"), [(0.0, 1.0), (2.0, 1.0), (8.0, 4.0), (1000.0, 10.0)])
def test_patience_grows_with_the_load_of_a_core(monkeypatch: pytest.MonkeyPatch, load: float, factor: float) -> None:
    monkeypatch.delenv("COMM_TESTS_PATIENCE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert patience() == factor


def test_ranks_have_the_patience_of_their_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "comm_utils.testing:patience"
    monkeypatch.delenv("COMM_TESTS_PATIENCE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with RankPool(2) as pool:
        for load in (2.25, 7.75):
            monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
            assert pool.run(target) == run_ranks(target, 2) == [load, load]
    assert run_ranks(target, 2, env={"COMM_TESTS_PATIENCE": "3"}) == [3.0, 3.0]


def test_patience_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_TESTS_PATIENCE", "3.5")
    assert patience() == 3.5
    monkeypatch.setenv("COMM_TESTS_PATIENCE", "0")
    with pytest.raises(ValueError, match="at least 1"):
        patience()
