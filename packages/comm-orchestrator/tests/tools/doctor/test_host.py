"""Shared memory, open files, variables and packages of one host, good and bad."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from comm_orchestrator.tools.doctor import limits, software, variables

MIB = 1024**2


def with_space(monkeypatch: pytest.MonkeyPatch, free_mib: int, total_mib: int) -> None:
    size = SimpleNamespace(f_frsize=MIB, f_bavail=free_mib, f_blocks=total_mib)
    monkeypatch.setattr(limits.os, "statvfs", lambda _: size)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    tmp_path.chmod(0o1777)
    return tmp_path


def test_enough_shared_memory(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    with_space(monkeypatch, 512, 512)
    (one,) = limits.check_shared_memory(8, shm)
    assert (one.level, one.found) == ("ok", f"{shm}: 512 MiB of 512 MiB free, for 8 ranks here")


@pytest.mark.parametrize(("free_mib", "level"), [(511, "warning"), (64, "warning"), (63, "problem"), (0, "problem")])
def test_too_little_shared_memory_in_a_container(
    monkeypatch: pytest.MonkeyPatch, shm: Path, free_mib: int, level: str
) -> None:
    with_space(monkeypatch, free_mib, 512)
    (one,) = limits.check_shared_memory(8, shm)
    assert one.level == level
    assert f"{free_mib} MiB of 512 MiB free" in one.found
    assert "64 MiB a rank" in one.found
    assert "docker run --shm-size=1024m or --ipc=host" in one.remedy


def test_shared_memory_that_somebody_filled(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    with_space(monkeypatch, 1, 100_000)
    (one,) = limits.check_shared_memory(2, shm)
    assert one.level == "problem"
    assert "remove what dead processes left" in one.remedy


def test_shared_memory_with_odd_rights(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    with_space(monkeypatch, 512, 512)
    shm.chmod(0o755)
    (one,) = limits.check_shared_memory(1, shm)
    assert (one.level, one.remedy) == ("warning", f"chmod 1777 {shm}")
    assert "mode 0755 instead of 1777" in one.found

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(limits.tempfile, "TemporaryFile", refuse)
    (one,) = limits.check_shared_memory(1, shm)
    assert (one.level, one.remedy) == ("problem", f"chmod 1777 {shm}")
    assert "cannot be written to: Permission denied" in one.found


def test_no_shared_memory(tmp_path: Path) -> None:
    (one,) = limits.check_shared_memory(1, tmp_path / "none")
    assert one.level == "problem"
    assert "mount -t tmpfs" in one.remedy


LIMITED = """
import json, os, resource, sys
from comm_orchestrator.tools.doctor import limits
for soft, hard, ranks in json.loads(sys.argv[1]):
    if os.fork() == 0:  # as a hard limit cannot be raised again
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (one,) = limits.check_open_files(0, ranks, min(ranks, 24))
        print(one.level, one.found, one.remedy, sep="|", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
OPEN_FILES = [
    (25, 4096, 2, "problem", "ulimit -n 1024"),
    (64, 4096, 2, "warning", "ulimit -n 1024"),
    (75, 4096, 24, "problem", "ulimit -n 1024"),
    (512, 4096, 2, "warning", "ulimit -n 1024"),
    (512, 512, 2, "warning", "ulimit nofile=1024"),
    (1024, 4096, 2, "ok", ""),
    (1024, 4096, 400, "warning", "ulimit -n 3712"),
    (1024, 4096, 1020, "problem", "ulimit nofile=8672"),
]


def test_open_files() -> None:
    command = [sys.executable, "-c", LIMITED, json.dumps([case[:3] for case in OPEN_FILES])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for (soft, hard, _, level, remedy), line in zip(OPEN_FILES, done.stdout.splitlines(), strict=True):
        got_level, found, got_remedy = line.split("|")
        assert got_level == level
        assert f"{soft} open files allowed, {hard} at most" in found
        assert remedy in got_remedy
        assert bool(got_remedy) == (level != "ok")


def test_variables() -> None:
    (one,) = variables.check({"PATH": "/bin"}, [])
    assert one.level == "ok"
    found = variables.check({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "WARN"}, ["COMM_X is not a setting"])
    assert [one.level for one in found] == ["warning", "warning"]
    assert found[0].found == "COMM_X is not a setting"
    assert found[1].remedy == "unset TORCH_DISTRIBUTED_DEBUG unless you need it"
    assert variables.relevant({"RANK": "1", "HOME": "/", "NCCL_ALGO": "Ring"}) == {"NCCL_ALGO": "Ring", "RANK": "1"}


def test_packages() -> None:
    found, build = software.versions(), software.torch_build()
    assert {"python", "torch", "numpy", "mpi4py", "comm-utils", "comm-backend-ccl"} <= set(found)
    assert len(software.OURS) == 6
    assert [one.level for one in software.check_packages(found, build)] == ["ok"]
    (one,) = software.check_packages({**found, "comm-utils": "0.0.1"}, build)
    assert one.level == "problem"
    assert one.remedy == f"pip install comm-utils=={found['comm-orchestrator']}"
    (one,) = software.check_packages(found, {**build, "distributed": False})
    assert (one.level, "without torch.distributed" in one.found) == ("problem", True)


def test_this_hosts_shared_memory_is_left_as_it_was() -> None:
    before = sorted(os.listdir("/dev/shm"))
    assert limits.check_shared_memory(1)
    assert sorted(os.listdir("/dev/shm")) == before


_HIDDEN = """
import json, os
from comm_orchestrator.tools.doctor import processes
os.setuid(65534)
print(json.dumps([[one.level, one.found, one.remedy] for one in processes.check_processes()]))
"""


@pytest.mark.parametrize(
    ("command", "level", "found"),
    [
        ("umount -l /proc", "warning", "/proc is not mounted"),
        ("mount -t proc -o hidepid=2 proc /proc", "warning", "/proc hides processes (hidepid="),
        ("mount -t proc -o hidepid=0 proc /proc", "ok", "/proc shows the processes of this host"),
    ],
)
def test_processes_that_are_not_seen(command: str, level: str, found: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a mount of /proc needs root and unshare")
    inside = f'{command} || exit 77; exec "$@"'
    whole = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", inside, "sh", sys.executable, "-c", _HIDDEN]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip(f"this machine does not let root mount /proc: {done.stderr}")
    ((level_found, text, remedy),) = json.loads(done.stdout)
    assert (level_found, bool(remedy)) == (level, level != "ok")
    assert text.startswith(found)
