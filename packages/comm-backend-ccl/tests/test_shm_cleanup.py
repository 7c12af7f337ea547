"""Files of libfabric's that killed ranks left are removed, and those of ranks that live are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from comm_backend_ccl.shm_cleanup import sweep

_CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_SWEEPS = """
import sys
from pathlib import Path
from comm_backend_ccl.shm_cleanup import sweep

sweep(Path(sys.argv[1]))
"""
# Makes the file of a process with this pid in its container, and waits there.
_MAKES = (
    "echo $(($1 - 1)) > /proc/sys/kernel/ns_last_pid; (cd \"$2\" && sh -c 'echo > $$:0:0; echo $$; read end'); true"
)

in_containers = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*_CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="needs a pid namespace of its own",
)
on_the_host = pytest.mark.skipif(
    not os.path.exists("/proc/self/ns/pid") or os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC,
    reason="only a process that sees all those of the host removes files of others",
)


def _ended() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


def _make(folder: Path, pid: int) -> str:
    name = f"{pid}:0:0"
    (folder / name).touch()
    return name


@on_the_host
def test_files_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    _make(tmp_path, _ended())
    kept = {_make(tmp_path, os.getpid()), _make(tmp_path, os.getppid())}
    (tmp_path / "other").touch()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "other"}
    sweep(tmp_path, ending=True)
    assert {path.name for path in tmp_path.iterdir()} == {f"{os.getppid()}:0:0", "other"}


@in_containers
def test_a_container_leaves_the_files_of_its_host(tmp_path: Path) -> None:
    name = _make(tmp_path, os.getpid())  # no process of the container has this pid
    subprocess.run([*_CONTAINER, sys.executable, "-c", _SWEEPS, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / name).exists()


@in_containers
def test_a_host_leaves_the_files_of_its_containers(tmp_path: Path) -> None:
    pid = _ended()  # no process of the host has this pid
    command = [*_CONTAINER, "sh", "-c", _MAKES, "sh", str(pid), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        own = int(container.stdout.readline())
        sweep(tmp_path)
        assert (tmp_path / f"{own}:0:0").exists()
