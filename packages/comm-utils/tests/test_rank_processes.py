"""The processes of ranks, for messages about those that nobody sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.host_identity import host_name
from comm_utils.process_state import start_time
from comm_utils.rank_processes import RankProcess, RankProcesses, describe_unseen, named_ranks, own_pid_space


def _process(pid: int, started: int = 0) -> RankProcess:
    return RankProcess(host_name(), pid, own_pid_space(), started)


def test_ranks_are_named_with_their_processes() -> None:
    known = {1: RankProcess("host-a", 12), 3: RankProcess("host-b", 13)}
    assert named_ranks([1], known) == "rank 1 (pid 12 on host-a)"
    assert named_ranks([3, 2, 1], known) == "ranks 1 (pid 12 on host-a), 2 and 3 (pid 13 on host-b)"
    assert named_ranks(range(4, 100), known) == "ranks 4, 5, 6, 7, 8, 9, 10, 11 and 88 more"


def test_a_process_that_has_ended_is_seen_where_its_pid_means_something() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = {0: _process(process.pid, start_time(process.pid))}
        assert not known[0].has_ended
        assert describe_unseen([0], known) == "it is not seen from here"
    assert known[0].has_ended
    assert describe_unseen([0], known) == "it is not seen from here, and its process has ended"
    assert describe_unseen([0, 1], known) == "they are not seen from here, and the process of rank 0 has ended"
    elsewhere = RankProcess(host_name(), process.pid, "another container", known[0].started)
    assert not elsewhere.has_ended
    assert describe_unseen([0], {0: elsewhere}) == "it is not seen from here"


def test_hosts_that_do_not_answer_are_named() -> None:
    known = {1: RankProcess("host-a", 12), 2: RankProcess(host_name(), 12), 3: RankProcess("host-b", 13)}
    assert describe_unseen([1, 2], known) == "they are not seen from here; check host-a and the network to it"
    assert describe_unseen([1, 3], known) == "they are not seen from here; check host-a, host-b and the network to them"


_SAYS_ITS_PROCESS = """
import json, os, sys
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.process_state import start_time
from comm_utils.rank_processes import own_pid_space

print(json.dumps([os.getpid(), start_time(), own_pid_space(), own_identity()]), flush=True)
sys.stdin.read()
"""


def test_a_process_in_another_time_namespace_is_not_taken_for_ended() -> None:
    """It reads another start time of itself than this process does."""
    shifted = ["unshare", "--time", "--boottime", "100000", "--monotonic", "100000", "--fork", "--kill-child"]
    if shutil.which(shifted[0]) is None or subprocess.run([*shifted, "true"], capture_output=True).returncode:
        pytest.skip("needs a time namespace of its own")
    command = [*shifted, sys.executable, "-c", _SAYS_ITS_PROCESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, started, space, identity = json.loads(process.stdout.readline())
        assert started != start_time(pid)
        assert not RankProcess("host-a", pid, space, started).has_ended
        assert identity != own_identity()  # the clock of its ring is another one, too


def test_they_are_of_one_world() -> None:
    processes = RankProcesses()
    processes.begin()  # that other code has made
    assert dict(processes) == {}
    processes.set_next([_process(1), _process(2)])
    assert list(processes) == [0, 1]
    processes.begin()
    assert processes[1].pid == 2
    assert -1 not in processes
    assert 2 not in processes
    processes.begin()
    assert dict(processes) == {}
    processes.set_next([_process(1)])
    processes.clear()  # the start failed
    processes.begin()
    assert dict(processes) == {}
