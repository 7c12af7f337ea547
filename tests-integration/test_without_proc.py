"""Ranks on a host that lacks ``/proc``, as in a bare chroot or a minimal container, or a loopback interface."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience

#: An empty folder at /proc, for this program and what it starts.
HIDE = 'mount --bind "$1" /proc || exit 1; shift; exec "$@"'
ONECCL = dist.available_backends()["ccl"].details.get("oneCCL", "").startswith("Gold")


def command(folder: Path, *program: str) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", HIDE, "sh", str(folder), *program]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("namespaces of mounts need root and unshare")
    if subprocess.run(command(tmp_path, "true"), capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root hide /proc")
    return tmp_path


def main() -> None:
    """Print the library and the results of this rank."""
    assert not os.path.exists("/proc/self")
    dist.init_distributed(sys.argv[1] or None, verbose=False, timeout=60 * patience())
    backend, ranks = dist.get_backend(), list(range(dist.get_world_size()))
    total, objects = torch.tensor([float(dist.get_rank())]), [None] * len(ranks)
    dist.all_reduce(total)
    dist.all_gather_object(objects, dist.get_rank())
    pair = torch.tensor([1.0])
    dist.all_reduce(pair, group=dist.new_group(ranks))
    dist.monitored_barrier()
    dist.destroy_process_group()
    print(json.dumps([backend, total.tolist(), objects, pair.tolist()]))


def run_ranks_without_proc(folder: Path, backend: str, size: int, **variables: str) -> list[Any]:
    """Return exit code, stdout and stderr of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"COMM_TESTS_PATIENCE": str(patience()), **variables}  # their time limits must agree
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(size):
        own = {} if size == 1 else {name: str(value) for name, value in {**place, "RANK": rank}.items()}
        started = command(folder, sys.executable, __file__, backend)
        environment = {**os.environ, "CCL_SHARED_MEMORY_PROFILE": "0", **own, **variables}
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(started, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        ended = [rank.communicate(timeout=120 * patience()) for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [(one.returncode, *texts) for one, texts in zip(ranks, ended, strict=True)]


@pytest.mark.parametrize(("backend", "size"), [("", 1), pytest.param("gloo", 2, marks=pytest.mark.slow), ("ccl", 2)])
def test_ranks_start_and_communicate(empty: Path, backend: str, size: int) -> None:
    if backend == "ccl" and not ONECCL:
        pytest.skip("without shared memory ccl needs oneCCL")
    found = run_ranks_without_proc(empty, backend, size)
    for code, output, errors in found:
        assert code == 0, errors
        name, total, objects, pair = json.loads(output.splitlines()[-1])
        assert name == backend or not backend
        assert (total, objects, pair) == ([size * (size - 1) / 2], list(range(size)), [float(size)])
    said = "oneCCL is used instead of shared memory: ranks share memory through /proc, which is not mounted here"
    assert (said in found[0][2]) is (backend == "ccl")


def test_a_library_that_needs_it_is_refused_with_the_remedy(empty: Path) -> None:
    ((code, _, errors),) = run_ranks_without_proc(empty, "ccl", 1, CCL_OFI_LIBRARY_PATH="/no/such/library")
    assert code == 1
    last = errors.splitlines()[-1]
    assert "BackendUnavailableError: init_distributed: dist_backend: backend 'ccl' cannot be used: ranks share" in last
    assert "mount it (mount -t proc proc /proc), or use dist_backend='gloo'" in last


def test_gloo_names_the_missing_loopback_interface(empty: Path) -> None:
    """In a network namespace whose loopback interface is down, as it is made."""
    program = "import comm_orchestrator as dist; dist.init_distributed('gloo', verbose=False)"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", program],
        capture_output=True, text=True, env=dict(os.environ), timeout=120 * patience(), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "LaunchError: gloo needs a loopback interface for ranks of one host" in done.stderr.splitlines()[-1]
    assert "GLOO_SOCKET_IFNAME" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("doctor",), ("bench", "-e", "64", "-n", "2", "--ranks", "2")])
def test_commands(empty: Path, arguments: Sequence[str]) -> None:
    program = [sys.executable, "-m", "comm_orchestrator", *arguments]
    environment = {**os.environ, "CCL_SHARED_MEMORY_PROFILE": "0"}
    done = subprocess.run(
        command(empty, *program), capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    main()
