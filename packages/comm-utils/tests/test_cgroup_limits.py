"""The smallest limit of tasks is read from the cgroups of a process, in both versions and inside containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from comm_utils import process_limits
from comm_utils.cgroup_limits import most_tasks

Texts = tuple[str, str]


def process_in(folder: Path, cgroup: str, mountinfo: str) -> Path:
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def limit(folder: Path, value: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(f"{value}\n")
    return folder / "pids.max"


V1 = "8:pids:{path}\n4:memory:/elsewhere\n0::/\n", "39 31 0:36 {root} {top} rw,relatime - cgroup cgroup rw,pids\n"
V2 = "0::{path}\n", "41 31 0:38 {root} {top} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize("version", [V1, V2])
def test_the_smallest_limit_on_the_way_up_binds(tmp_path: Path, version: Texts) -> None:
    top = tmp_path / "cgroups"
    limit(top / "user.slice" / "job", "90")
    smallest = limit(top / "user.slice", "20")
    limit(top, "max")
    limit(tmp_path, "1")  # above the mount point
    cgroup, mountinfo = (text.format(path="/user.slice/job", root="/", top=top) for text in version)
    assert most_tasks(process_in(tmp_path, cgroup, mountinfo)) == (20, smallest)


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("path", ["/docker/3f", "/", "/../outside"])
def test_a_container_has_its_own_cgroup_mounted(tmp_path: Path, version: Texts, path: str) -> None:
    own = limit(tmp_path / "cgroups", "64")
    cgroup, mountinfo = (text.format(path=path, root="/docker/3f", top=own.parent) for text in version)
    assert most_tasks(process_in(tmp_path, cgroup, mountinfo)) == (64, own)


@pytest.mark.parametrize("version", [V1, V2])
def test_there_may_be_no_limit(tmp_path: Path, version: Texts) -> None:
    limit(tmp_path / "cgroups", "max")
    cgroup, mountinfo = (text.format(path="/", root="/", top=tmp_path / "cgroups") for text in version)
    assert most_tasks(process_in(tmp_path, cgroup, mountinfo)) is None


@pytest.mark.parametrize("texts", [("", ""), ("nonsense", "too"), ("8:pids:/\n", "39 31\n")])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, texts: Texts) -> None:
    assert most_tasks(process_in(tmp_path, *texts)) is None
    assert most_tasks(tmp_path / "missing") is None


def test_the_error_names_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/sys/fs/cgroup/job/pids.max")
    monkeypatch.setattr(process_limits, "most_tasks", lambda: (14, path))
    monkeypatch.setattr(process_limits, "_limit", lambda name: None)
    text = process_limits.lack_of_threads(RuntimeError("can't start new thread"))
    assert f"the user's limit is unlimited, that of the cgroup 14 ({path}): raise what is too low" in text
