"""Ranks in containers that share the network of their host: real namespaces of processes and host names."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience

#: What is in them ends with the process that made them.
UNSHARE = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
#: The shell is process 1, and gives the process that follows the pid that is asked for.
PREPARE = 'hostname "$1"; test "$2" = 1 || echo $(($2 - 1)) > /proc/sys/kernel/ns_last_pid; pid=$2; shift 2; '
START = 'test $pid != 1 || exec "$@"; "$@"; exit $?'


def cannot_isolate() -> str:
    if os.geteuid() != 0:
        return "namespaces of processes need root"
    if lacking := [tool for tool in (UNSHARE[0], "hostname") if not shutil.which(tool)]:
        return f"namespaces of processes need {', '.join(lacking)}"
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        return "this machine does not let root make namespaces"
    return ""


def results(group: Any = None) -> list[list[float]]:
    """Return what collectives give to this rank."""
    rank, size = float(dist.get_rank()), dist.get_world_size(group)
    summed, received, gathered = torch.tensor([rank]), torch.tensor([rank]), torch.empty(size)
    dist.all_reduce(summed, group=group)
    dist.broadcast(received, 0, group=group)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank]), group=group)
    return [summed.tolist(), received.tolist(), gathered.tolist()]


def main() -> None:
    """Print who this rank is, and the results of the world and of a group without rank 1."""
    dist.init_distributed("ccl", timeout=60 * patience(), verbose=False)
    found = [results()]
    others = [rank for rank in range(dist.get_world_size()) if rank != 1]
    group = dist.new_group(others)
    if dist.get_rank() in others:
        found.append(results(group))
    print(json.dumps([socket.gethostname(), os.getpid(), found]))
    dist.destroy_process_group()


def run_in_containers(containers: Sequence[tuple[str, int]]) -> list[Any]:
    """Return what ranks print that have these host names and pids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size, factor = len(containers), patience()  # one for all: their time limits must agree
    ranks = []
    for rank, (host, pid) in enumerate(containers):
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        settings = {name: str(value) for name, value in place.items()}
        settings |= {"MASTER_ADDR": "127.0.0.1", "CCL_SHARED_MEMORY": "0", "COMM_TESTS_PATIENCE": str(factor)}
        command = [*UNSHARE, "sh", "-c", PREPARE + START, "sh", host, str(pid), sys.executable, __file__]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env={**os.environ, **settings}, stdout=pipe, stderr=pipe, text=True))
    try:
        ended = [rank.communicate(timeout=120 * patience()) for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    for one, (_, errors) in zip(ranks, ended, strict=True):
        assert one.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


@pytest.mark.parametrize(
    "containers",
    [
        pytest.param([("host", 1)] * 3, id="one name and one pid"),
        pytest.param([("vm1", 1), ("vm", 11)], id="names and pids that are equal when they are joined"),
    ],
)
def test_ranks_of_one_name_and_pid_are_not_taken_for_one_process(containers: list[tuple[str, int]]) -> None:
    """The promise is the right result: each rank reduced with itself, and nothing raised."""
    if reason := cannot_isolate():
        pytest.skip(reason)
    size = len(containers)
    for rank, (name, pid, found) in enumerate(run_in_containers(containers)):
        assert (name, pid) == containers[rank]
        for ranks, got in zip([range(size), [one for one in range(size) if one != 1]], found, strict=False):
            numbers = [float(one) for one in ranks]
            assert got == [[sum(numbers)], [0.0], numbers]


if __name__ == "__main__":
    main()
