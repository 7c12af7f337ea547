"""The file in which ranks meet: nobody else may write it, and nothing of it stays."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore

from comm_orchestrator.rendezvous import file_store
from comm_orchestrator.rendezvous.file_store import check_private, own_file
from comm_utils.errors import LaunchError
from comm_utils.launch import LaunchInfo
from comm_utils.testing import patience


def of_job(**changes: object) -> LaunchInfo:
    facts: dict[str, object] = {"launcher": "torchrun", "rank": 0, "world_size": 2, "local_world_size": 2}
    return LaunchInfo(**{**facts, "job_id": "job", **changes})  # type: ignore[arg-type]


def test_a_file_in_a_private_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    before = os.umask(0)
    try:
        check_private(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = FileStore(str(path))
    first.set("key", "of a rank that came first")
    check_private(path)
    assert first.get("key") == b"of a rank that came first"


# How much is missing at the end: of the value, of its length, or both of these.
@pytest.mark.parametrize("part", ["other", 3, len(b"value") + 3, len(b"value") + 4])
def test_a_file_that_torch_would_read_for_ever_is_refused(tmp_path: Path, part: str | int) -> None:
    path = tmp_path / "meet"
    if isinstance(part, str):
        path.write_text("import torch")
    else:
        whole = tmp_path / "whole"
        check_private(whole)
        store = FileStore(str(whole))
        store.set("key", "value")
        check_private(whole)
        path.write_bytes(whole.read_bytes()[:-part])
    path.chmod(0o600)
    with pytest.raises(LaunchError, match=r"holds something else than torch's FileStore writes.*; remove it"):
        check_private(path)


def test_a_file_that_cannot_be_read_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "meet")
        path.touch(0o200)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root could read it
        try:
            with pytest.raises(LaunchError, match=r"meet: the file cannot be read or locked \(Permission denied\)"):
                check_private(path)
        finally:
            os.seteuid(user)


def _no_folder(folder: Path) -> Path:
    return folder / "none" / "meet"


def _open_folder(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder / "meet"


def _open_file(folder: Path) -> Path:
    (folder / "meet").touch()
    (folder / "meet").chmod(0o666)
    return folder / "meet"


def _file_of_the_group(folder: Path) -> Path:
    (folder / "meet").touch()
    (folder / "meet").chmod(0o660)
    return folder / "meet"


def _link(folder: Path) -> Path:
    (folder / "other").touch()
    (folder / "meet").symlink_to("other")
    return folder / "meet"


def _file_in_between(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "meet"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_no_folder, r"its folder .*/none cannot be used \(No such file or directory\)"),
        (_open_folder, r"every user may replace files in its folder .* \(mode 0777\)"),
        (_open_file, r"other users may write the file \(mode 0666\)"),
        (_file_of_the_group, r"other users may write the file \(mode 0660\)"),
        (_link, "it is a link, or no file at all"),
        (_file_in_between, "is no folder|Not a directory"),
    ],
)
def test_what_others_could_change_is_refused(tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    with pytest.raises(LaunchError, match=why) as caught:
        check_private(make(tmp_path))
    assert "init_method='file://'" in str(caught.value)
    assert "meet" in str(caught.value)


def test_a_sticky_folder_of_all_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    check_private(tmp_path / "meet")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meet").touch(0o600)
    os.chown(tmp_path / "meet", 65534, 65534)
    with pytest.raises(LaunchError, match=r"belongs to another user \(uid 65534; this is uid 0\)"):
        check_private(tmp_path / "meet")


def test_ranks_of_a_job_find_one_file_and_others_another(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    first = own_file(of_job(), environ)
    assert own_file(of_job(rank=1), environ) == first
    others = [
        own_file(of_job(job_id="other"), environ),
        own_file(of_job(master_port=29501), environ),
        own_file(of_job(), {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}),
    ]
    assert len({first, *others}) == 4
    assert {one.parent for one in (first, *others)} == {tmp_path / f"comm-{os.getuid()}"}
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"local_world_size": 1}, "2 ranks, of which 1 run on this host; name a file that all hosts share"),
        ({"job_id": None}, "gave this job of 2 ranks no id by which they find each other; set MASTER_PORT"),
    ],
)
def test_ranks_that_could_not_find_each_other_are_refused(
    changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=text):
        own_file(of_job(**changes), {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"comm-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="is not a private folder of this user"):
        own_file(of_job(), {"XDG_RUNTIME_DIR": str(tmp_path)})


# Two ranks that are killed, and two that end, forked from one process that has imported torch.
_RANKS = """
import os, sys
from datetime import timedelta
from comm_orchestrator.rendezvous import file_store
from comm_utils.launch import LaunchInfo
for end in ("killed", "ended"):
    for rank in range(2):
        if os.fork() == 0:
            launch = LaunchInfo("torchrun", rank, 2, local_world_size=2, job_id="job")
            store, path = file_store.store_of_job(launch, os.environ, timedelta(seconds=30))
            store.set(str(rank), "here")
            said = end, oct(path.stat().st_mode & 0o777), store.get(str(1 - rank)).decode()
            os.write(1, (" ".join(said) + "\\n").encode())  # in one piece, beside the other rank's
            if end == "killed":
                os._exit(0)
            sys.exit()
    assert os.wait()[1] == os.wait()[1] == 0
    print("left:", sum(len(files) for _, _, files in os.walk(os.environ["XDG_RUNTIME_DIR"])) > 0, flush=True)
"""


def test_processes_meet_in_it_and_nothing_stays(tmp_path: Path) -> None:
    """What killed processes leave does not disturb those that come next."""
    command, env = [sys.executable, "-c", _RANKS], {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    lines = [*["killed 0o600 here"] * 2, "left: True", *["ended 0o600 here"] * 2, "left: False"]
    assert done.stdout.splitlines() == lines
    assert list(tmp_path.rglob("*")) == []


def test_a_forked_child_leaves_its_parents_file(tmp_path: Path) -> None:
    store, path = file_store.store_of_job(of_job(), {"XDG_RUNTIME_DIR": str(tmp_path)}, timedelta(seconds=5))
    try:
        child = os.fork()
        if child == 0:
            file_store._release(os.getppid())
            os._exit(0)
        os.waitpid(child, 0)
        assert path.exists()
        store.set("key", "value")
    finally:
        file_store._release(os.getpid())
    assert list(tmp_path.iterdir()) == []
