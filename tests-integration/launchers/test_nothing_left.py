"""Nothing that a launcher started outlives its test: no process, interface, mount or file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comm_utils.testing import patience
from launchers import hosts, mpi, slurm
from launchers.hosts import two_hosts
from launchers.launcher import Launcher
from launchers.processes import MARKER, Command, find_marked, kill_marked, run

FOR_EVER = [sys.executable, "-c", "import time; time.sleep(600)"]
# Leaves the process group and its parent, as daemons do.
DAEMON = [sys.executable, "-c", "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"]


def of_this_machine() -> set[str]:
    """What could be left, apart from processes and temporary files."""
    named = Path("/run/netns")
    return {
        *(f"interface {name}" for name in os.listdir("/sys/class/net")),
        *(f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        *(f"network {path.name}" for path in (named.iterdir() if named.exists() else ())),
        *(f"host {line}" for line in Path("/etc/hosts").read_text().splitlines()),
    }


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A mark of the processes of this test alone. Temporary files are in the test's own folder, and gone in the end."""
    ours = {MARKER: tmp_path.name}
    monkeypatch.setenv(MARKER, tmp_path.name)
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield ours
        kill_marked(ours)


def two_nodes_with_a_job() -> None:
    with slurm.two_nodes() as cluster:
        (job,) = run([cluster.command(["srun", "-N2", "-n4", *FOR_EVER])], deadline_s=3)
        assert job.returncode is None
        # That one was killed does not keep the next one waiting.
        (job,) = run([cluster.command(["srun", "-N2", "-n4", "true"])], deadline_s=20)
        assert job.returncode == 0, job
        raise KeyError("a test that fails")


def two_hosts_with_daemons() -> None:
    with two_hosts("hostA", "hostB") as both:
        for host in both:
            subprocess.run(host.command(DAEMON).arguments, check=True, timeout=30)
        raise KeyError("a test that fails")


@pytest.mark.parametrize(
    ("missing", "body"),
    [(hosts.missing, two_hosts_with_daemons), (slurm.missing, two_nodes_with_a_job)],
    ids=["hosts", "slurm"],
)
def test_a_service_leaves_nothing_after_a_failure(
    missing: Callable[[], str], body: Callable[[], None], mark: dict[str, str]
) -> None:
    if reason := missing():
        pytest.skip(reason)
    before = of_this_machine()
    with pytest.raises(KeyError):
        body()
    assert find_marked(mark) == {}
    assert os.listdir(tempfile.gettempdir()) == []
    assert of_this_machine() <= before


def test_the_daemons_end_with_the_tests_that_were_killed(mark: dict[str, str]) -> None:
    if reason := slurm.missing():
        pytest.skip(reason)
    before = of_this_machine()
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from launchers import slurm
with slurm.two_nodes():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL

    end_s = time.monotonic() + 10
    while find_marked(mark) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert find_marked(mark) == {}
    assert of_this_machine() <= before


@pytest.mark.parametrize("launcher", ["torchrun", "torchrun-two-agents", *mpi.ALL], indirect=True)
def test_ranks_that_hang_are_killed_at_the_deadline(launcher: Launcher, mark: dict[str, str]) -> None:
    before = of_this_machine()
    started_s = time.monotonic()
    finished = launcher.run(FOR_EVER, ranks=2, deadline_s=3)
    assert time.monotonic() - started_s < 3 + 5 * patience()
    assert [one.returncode for one in finished] == [None] * len(finished)
    assert find_marked(mark) == {}
    assert os.listdir(tempfile.gettempdir()) == []
    assert of_this_machine() <= before


def test_a_daemon_ends_with_the_command_that_started_it(mark: dict[str, str]) -> None:
    (done,) = run([Command(DAEMON)], deadline_s=30)
    assert done.returncode == 0
    assert done.duration_s < 10 * patience()
    assert find_marked(mark) == {}


def test_ranks_know_nothing_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "COMM_LOG"):
        monkeypatch.setenv(name, "7")
    (done,) = run([Command(["env"], {"PMI_SIZE": "2"})], deadline_s=30)
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "OMP_NUM_THREADS" in names
    launchers = ("RANK", "MASTER", "SLURM", "OMPI", "PMI", "COMM")
    assert [name for name in names if name.startswith(launchers)] == ["PMI_SIZE"]
