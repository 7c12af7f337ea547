"""The file of the host's profile: what is kept, and what is not believed."""

from __future__ import annotations

import json
import logging
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


def test_nothing_is_measured_that_cannot_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    assert not host_profile.is_wanted(2)
    assert host_profile.store(2, ROWS, "a test") is None


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
