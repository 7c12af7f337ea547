"""Which rings commands open, where a process may open few files or may not look into a folder."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from comm_orchestrator.tools import rings
from comm_orchestrator.tools.rings import opened_job
from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder.layout import EntryType
from comm_utils.flight_recorder.memory import RingMemory, ring_bytes
from comm_utils.observability.traces.file import load

W = 40
_OTHER_USER = 65534


@pytest.fixture
def two_jobs(tmp_path: Path) -> Path:
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        for rank in range(W):
            write_ring(tmp_path / job / f"rank-{rank}.ring", job, rank)
    return tmp_path


def write_ring(path: Path, job: str, rank: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, ring_bytes(16))
    memory = RingMemory(16, rank, W, descriptor)
    process = {"host": "h", "identity": "", "job": job, "python": "", "program": ""}
    memory.add_entry(EntryType.PROCESS, process)
    memory.close()
    os.close(descriptor)


@pytest.fixture
def few_files() -> Iterator[int]:
    """Let this process open 20 more files, without privileges."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    limit = next(one for one in range(20, before[0]) if len(set(range(one)) - used) == 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="has no list of open files")
def test_a_job_with_more_rings_than_the_limit_of_open_files(two_jobs: Path, few_files: int) -> None:
    with opened_job(str(two_jobs)) as job:
        assert (job.name, len(job.readers), job.damaged, job.other_jobs) == ("second", W, [], ["first"])
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few_files


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="has no list of open files")
@pytest.mark.usefixtures("few_files")
def test_a_limit_that_cannot_be_raised_is_no_damage(two_jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "_allow_files", lambda number: None)
    with (
        pytest.raises(ArgumentError, match="Too many open files; a ring takes up to 2: raise the limit with ulimit -n"),
        opened_job(str(two_jobs)),
    ):
        pass


@contextmanager
def as_other_user() -> Iterator[None]:
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(_OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can enter, unlike those above ``tmp_path``."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_of_another_user(public: Path) -> None:
    private = public / "private"
    private.mkdir(mode=0o700)
    write_ring(private / "rank-0.ring", "private", 0)
    (private / "rank0.jsonl").write_text("{}")
    with as_other_user():
        for folder in (private, public):
            expected = f"{folder}: no ring can be read: {private}: Permission denied"
            with pytest.raises(ArgumentError, match=f"^{expected}$"), opened_job(str(folder)):
                pass
        with pytest.raises(PermissionError):
            load(private)


def test_a_folder_that_cannot_be_entered_is_named_beside_others(public: Path) -> None:
    private = public / "private"
    private.mkdir(mode=0o700)
    write_ring(public / "rank-0.ring", "seen", 0)
    (public / "rank-0.ring").chmod(0o644)
    with as_other_user(), opened_job(str(public)) as job:
        assert (job.name, list(job.readers), job.damaged) == ("seen", [0], [f"{private}: Permission denied"])
