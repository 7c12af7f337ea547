"""The states of processes, also of those that ``/proc`` does not show."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from comm_utils.process_state import is_alive, is_ending, process_state, start_time, wait_status

_OF_ANOTHER_USER = """
import os, subprocess
from comm_utils.process_state import is_alive, is_ending, process_state, start_time

lives, ended = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])
started = start_time(lives.pid)
ended.wait()
os.setgroups([])
os.setgid(2000)
os.setuid(2000)
print(process_state(lives.pid, started), is_alive(lives.pid), is_ending(lives.pid))
print(process_state(ended.pid), is_alive(ended.pid), is_ending(ended.pid))
print(process_state(os.getpid()))
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_that_is_hidden_is_not_taken_for_one_that_has_ended(hidepid: int) -> None:
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a namespace of processes and a /proc of its own")
    found = subprocess.run([*apart, sys.executable, "-c", _OF_ANOTHER_USER], capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines() == ["unknown True False", "ended False True", "running"], found.stderr


def test_the_states_of_a_process() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = start_time(child.pid)
    try:
        assert process_state(child.pid, started) in ("running", "stopped")
        assert process_state(child.pid, started + 1) == "ended"
        assert not is_ending(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_state(child.pid, started) == "stopped"
    finally:
        assert wait_status(child.pid, started) is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc
        assert process_state(child.pid) == "ended"
        assert wait_status(child.pid, started) == signal.SIGKILL
        assert wait_status(child.pid, started + 1) is None
        assert is_ending(child.pid)
        child.wait()
    assert wait_status(child.pid, started) is None
    assert not is_alive(child.pid)
    assert not is_alive(2**40)  # no number of a process
