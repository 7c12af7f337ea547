"""Peers of a group: whether they live, are ending or have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

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
