"""The file of the host's profile: what is kept, and what is not believed."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm_backend_ccl import host_profile
from comm_backend_ccl.host_profile import Row

ROWS = [Row("all_reduce", 65536, False, True, "cached", 5000), Row("all_reduce", 65536, False, True, "streamed", 7000)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(host_profile.VARIABLE, raising=False)
    monkeypatch.setattr(host_profile, "_warnings", set())
    monkeypatch.setattr(host_profile, "_unwritable", set())
    return tmp_path


def test_what_is_stored_is_loaded(cache: Path) -> None:
    assert host_profile.is_wanted(2)
    assert host_profile.load(2)[0] == []
    file = host_profile.store(2, ROWS, "a test")
    assert file is not None
    assert file.parent == cache / "comm-backend-ccl"
    assert host_profile.load(2)[0] == ROWS
    assert not host_profile.is_wanted(2)
    assert host_profile.is_wanted(4)
    host_profile.store(4, ROWS[:1], "another")
    assert host_profile.load(2)[0] == ROWS
    assert host_profile.load(4)[0] == ROWS[:1]
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    assert host_profile.describe() == f"{file}, measured with 2 ranks by a test, 4 ranks by another"


def test_a_measurement_that_was_cut_off_goes_on(cache: Path) -> None:
    host_profile.store(2, ROWS[:1], "a test", is_whole=False)
    assert host_profile.load(2)[0] == ROWS[:1]
    assert host_profile.is_wanted(2)
    later = Row("broadcast", 65536, False, False, "cached", 6000)
    host_profile.store(2, [later], "a test", is_whole=False)
    assert host_profile.load(2)[0] == [ROWS[0], later]
    host_profile.store(2, [ROWS[0]._replace(ns=4000)], "a test", is_whole=False)
    assert sorted(host_profile.load(2)[0]) == [ROWS[0]._replace(ns=4000), later]
    host_profile.store(2, ROWS, "a test")
    assert host_profile.load(2)[0] == ROWS
    assert not host_profile.is_wanted(2)


def test_a_measurement_that_is_cut_off_each_time_is_given_up(cache: Path) -> None:
    tries = 0
    while host_profile.is_wanted(2):
        host_profile.store(2, [], "a test", is_whole=False)
        tries += 1
    assert tries == 3
    assert host_profile.load(2) == ([], "")
    assert host_profile.known()["ranks"] == {}
    assert host_profile.is_wanted(4)


def test_one_group_measures_at_a_time(cache: Path) -> None:
    file = host_profile.path()
    assert file is not None
    for _ in range(2):
        with host_profile.sole_measurement() as first, host_profile.sole_measurement() as second:
            assert (first, second) == (True, False)
        assert list(file.parent.iterdir()) == []


KILLED = """
import os, signal
from comm_backend_ccl import host_profile
with host_profile.sole_measurement() as is_alone:
    assert is_alone
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_keeps_no_other_from_measuring(cache: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED], timeout=120, check=False).returncode == -signal.SIGKILL
    file = host_profile.path()
    assert file is not None
    assert len(list(file.parent.iterdir())) == 1
    with host_profile.sole_measurement() as is_alone:
        assert is_alone
    assert list(file.parent.iterdir()) == []


def test_what_cannot_be_written_is_not_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(json, "dump", is_full)
        assert host_profile.store(2, ROWS, "a test") is None
    assert not host_profile.is_wanted(2)
    assert any("No space left on device" in one for one in host_profile._warnings)


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    file = host_profile.store(2, ROWS, "a test")
    assert file is not None
    old, young = (file.with_name(f".{file.name}.{one * 16}.tmp") for one in "ab")
    for one in (old, young):
        one.write_text("{")
    os.utime(old, (0, 0))
    host_profile.store(2, ROWS, "a test")
    assert sorted(file.parent.iterdir()) == sorted([file, young])


def test_a_group_of_one_rank_wants_none(cache: Path) -> None:
    assert not host_profile.is_wanted(1)


def test_it_can_be_elsewhere_or_nowhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_profile.VARIABLE, str(cache / "own.json"))
    assert host_profile.store(2, ROWS, "a test") == cache / "own.json"
    assert host_profile.load(2)[0] == ROWS
    monkeypatch.setenv(host_profile.VARIABLE, "0")
    assert host_profile.path() is None
    assert host_profile.load(2)[0] == []
    assert not host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, "a test") is None
    assert host_profile.describe() == "none"


def test_a_relative_cache_folder_is_ignored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    monkeypatch.setenv("HOME", str(cache / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    file = host_profile.path()
    assert file is not None
    assert file.parent == cache / "home" / ".cache" / "comm-backend-ccl"


def test_nothing_is_measured_that_cannot_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    assert not host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, "a test") is None
    assert host_profile.known()["unavailable_reason"] == f"{cache / 'file'} cannot be written"
    assert host_profile.describe() == f"none; {cache / 'file'} cannot be written"


def make_fifo(file: Path) -> None:
    os.mkfifo(file)


def make_loop(file: Path) -> None:
    file.symlink_to(file)


@pytest.mark.parametrize("make", [make_fifo, make_loop, Path.mkdir])
def test_what_is_no_file_is_neither_waited_for_nor_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    file = cache / "profile"
    make(file)
    monkeypatch.setenv(host_profile.VARIABLE, str(file))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert host_profile.load(2) == ([], "")
            assert not host_profile.is_wanted(2)
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    assert "remove it" not in caplog.text
    assert host_profile.store(2, ROWS, host_profile.TUNE) is None
    assert str(file) in host_profile.unavailable_reason(host_profile.TUNE)


def test_a_device_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_profile.VARIABLE, "/dev/zero")
    assert host_profile.load(2) == ([], "")
    assert not host_profile.is_wanted(2)


def test_a_file_that_is_no_profile_is_not_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cache / "train.py"
    program.write_text("print()")
    monkeypatch.setenv(host_profile.VARIABLE, str(program))
    assert not host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, host_profile.FIRST_GROUP) is None
    assert host_profile.store(2, ROWS, host_profile.TUNE) is None
    assert host_profile.known()["unavailable_reason"] == f"{program} is not a profile, and is not replaced"
    assert program.read_text() == "print()"
    program.write_text("")  # as mktemp makes it
    assert host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, host_profile.FIRST_GROUP) == program


def test_a_named_file_of_another_machine_is_replaced_by_tune_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = cache / "shared.json"
    monkeypatch.setenv(host_profile.VARIABLE, str(file))
    host_profile.store(2, ROWS, host_profile.TUNE)
    content = json.loads(file.read_text())
    content["machine"]["processor"] = "other"
    file.write_text(json.dumps(content))
    before = file.read_text()
    with caplog.at_level(logging.WARNING):
        assert not host_profile.is_wanted(2)
        assert not host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, host_profile.FIRST_GROUP) is None
    assert file.read_text() == before
    (record,) = caplog.records
    assert f"{file} was measured on another machine" in record.getMessage()
    assert host_profile.store(2, ROWS, host_profile.TUNE) == file
    assert host_profile.load(2) == (ROWS, host_profile.TUNE)


def test_a_home_folder_may_be_short(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cache))
    monkeypatch.setenv(host_profile.VARIABLE, "~/own.json")
    assert host_profile.path() == cache / "own.json"


def test_another_machines_is_replaced(cache: Path) -> None:
    file = host_profile.store(2, ROWS, "a test")
    assert file is not None
    content = json.loads(file.read_text())
    content["machine"]["kernel"] += "-other"
    file.write_text(json.dumps(content))
    assert host_profile.load(2)[0] == []
    host_profile.store(4, ROWS, "a test")
    assert host_profile.load(2)[0] == []
    assert host_profile.load(4)[0] == ROWS


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (7, "expected a list"),
        ([["all_reduce", 65536, False, True, "cached"]], "got the row"),
        ([["all_reduce", 65536, False, True, "cached", 0]], "got the row"),
        ([["all_reduce", True, False, True, "cached", 9]], "got the row"),
        ([["all_reduce", 65536, 0, True, "cached", 9]], "got the row"),
        ([["all_reduce", 65536, False, True, "cached", 1e3]], "got the row"),
        ([["all_reduce", 1 << 62, False, True, "cached", 9]], "got the row"),
        ([list(ROWS[0])] * 5000, "at most 4096 rows"),
        ([["all_reduce\n", 65536, False, True, "cached", 9]], "got the row"),
        ([["all_reduce", 65536, False, True, "x" * 81, 9]], "got the row"),
    ],
)
def test_odd_rows_are_not_believed(cache: Path, caplog: pytest.LogCaptureFixture, rows: Any, named: str) -> None:
    file = host_profile.store(2, ROWS, "a test")
    assert file is not None
    content = json.loads(file.read_text())
    content["ranks"]["2"]["rows"] = rows
    file.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert host_profile.load(2)[0] == []
    assert named in caplog.text
    assert str(file) in caplog.text
    assert "commctl tune" in caplog.text


def test_a_file_that_cannot_be_read_is_warned_of_with_the_remedy_where_it_is_wanted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache / "folder"
    folder.mkdir()
    monkeypatch.setenv(host_profile.VARIABLE, str(folder))
    with caplog.at_level(logging.WARNING):
        described = host_profile.describe()
        assert not host_profile.is_wanted(2)
        host_profile.known()
        assert caplog.messages == []
        assert host_profile.load(2) == ([], "")
    (warning,) = caplog.messages
    assert str(folder) in described
    assert str(folder) in warning
    assert "let XDG_CACHE_HOME name a folder of this user, or CCL_SHARED_MEMORY_PROFILE a file" in warning
    assert "CCL_SHARED_MEMORY_PROFILE=0 does without" in warning


@pytest.mark.parametrize("tries", [-1, True, "many"])
def test_odd_numbers_of_tries_are_not_believed(cache: Path, caplog: pytest.LogCaptureFixture, tries: Any) -> None:
    file = host_profile.store(2, ROWS, "a test", is_whole=False)
    assert file is not None
    content = json.loads(file.read_text())
    content["ranks"]["2"]["tries"] = tries
    file.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert host_profile.load(2)[0] == []
    assert "expected a number of measurements" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 9999, '{"ranks": 3}', "x" * (5 << 20), "\0"])
def test_odd_files_are_not_believed(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    file = host_profile.path()
    assert file is not None
    file.parent.mkdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert host_profile.load(2)[0] == []
    assert str(file) in caplog.text
    host_profile.store(2, ROWS, "a test")
    assert host_profile.load(2)[0] == ROWS


def test_a_number_of_ranks_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_profile.VARIABLE, str(tmp_path / "profile.json"))
    host_profile.store(2, ROWS, "a test")
    file = tmp_path / "profile.json"
    content = json.loads(file.read_text())
    content["ranks"]["many"] = content["ranks"]["2"]
    file.write_text(json.dumps(content))
    assert host_profile.load(2) == ([], "")
    assert host_profile.known()["ranks"] == {}
