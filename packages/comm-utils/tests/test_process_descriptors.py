"""Descriptors of processes: shared, and how they say that a process has ended."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys

import pytest

from comm_utils.process_descriptors import ProcessDescriptor
from comm_utils.process_state import describe_end

try:
    os.close(os.pidfd_open(os.getpid()))
except (AttributeError, OSError):
    pytest.skip("needs Linux 5.3, and a sandbox that lets processes have descriptors", allow_module_level=True)
_RELEASE = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
_WAITS = [False, pytest.param(True, marks=pytest.mark.skipif(_RELEASE < (6, 15), reason="needs Linux 6.15"))]


@pytest.mark.parametrize("parent_has_waited", _WAITS)
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL"),
        ("import os, sys; sys.stdin.read(); os.abort()", "by SIGABRT"),
        ("import sys; sys.stdin.read(); sys.exit(3)", "with exit status 3"),
        ("import sys; sys.stdin.read()", "with exit status 0"),
    ],
)
def test_a_descriptor_says_how_a_process_has_ended(program: str, end: str, parent_has_waited: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        descriptor = ProcessDescriptor.hold(child.pid)
        assert (descriptor.has_ended(), descriptor.wait_status()) == (False, None)
        assert child.stdin is not None
        child.stdin.close()
        child.wait() if parent_has_waited else os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        status = descriptor.wait_status()
        descriptor.release()
    assert status is not None
    assert describe_end(status) == end


def test_a_process_that_has_ended_has_no_descriptor() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        ProcessDescriptor.hold(child.pid)


def test_holders_share_a_descriptor_until_the_last_releases_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        first, second = ProcessDescriptor.hold(child.pid), ProcessDescriptor.hold(child.pid)
        assert first is second
        first.release()
        assert not second.has_ended()
        child.kill()
        child.wait()
        assert second.has_ended()
        second.release()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(second.number)


def test_ends_in_words() -> None:
    assert describe_end(signal.SIGSEGV | 0x80) == "by SIGSEGV"  # with a core dump
    assert describe_end(256) == "with exit status 1"
    assert describe_end(35) == "by signal 35"
