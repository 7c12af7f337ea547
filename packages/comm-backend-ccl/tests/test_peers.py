"""Peers of a group: whether they live, are ending or have gone."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from comm_backend_ccl.peers import Peers, Process, this_process


def test_a_peer_that_lives_is_neither_ending_nor_gone() -> None:
    mine = this_process()
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        peers = Peers([mine, Process(mine.host, mine.machine, child.pid)], 0)
        assert peers.gone() == set()
        assert not peers.any_ending()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc
        end = time.monotonic() + 10
        ending = peers.any_ending()
        while peers.gone() != {1} and time.monotonic() < end:
            time.sleep(0.01)
        assert ending, "before it was seen to be gone"
        assert peers.gone() == {1}
        assert not peers.any_ending(), "those that have gone do not count"
        peers.close()
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def descriptors_of_processes() -> int:
    found = 0
    for one in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{one}")
    return found


def test_groups_share_the_descriptor_of_a_peer() -> None:
    mine = this_process()
    before = descriptors_of_processes()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        groups = [Peers([mine, Process(mine.host, mine.machine, child.pid)], 0) for _ in range(3)]
        assert descriptors_of_processes() == before + 1
        groups.pop().close()
        child.kill()
        child.wait()
    end = time.monotonic() + 10
    while any(one.gone() != {1} for one in groups) and time.monotonic() < end:
        time.sleep(0.01)
    assert [one.gone() for one in groups] == [{1}, {1}]
    for one in groups:
        one.close()
        one.close()
    assert descriptors_of_processes() == before


def test_the_log_says_once_that_peers_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = this_process()
    monkeypatch.setattr("comm_backend_ccl.peers.Peers._has_warned", False)
    monkeypatch.setattr("comm_utils.log.logger.propagate", True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for _ in range(2):
            peers = Peers([mine, Process(mine.host, mine.machine, os.getppid())], 0)
            assert peers.gone() == set()
            peers.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "only at the timeout" in caplog.text
