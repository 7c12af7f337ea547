"""The planted faults: that each has its place, and that a fault is told from none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mutate
from workspace import ROOT

FAULTS = mutate.read()


def test_there_are_enough() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_has_its_place_and_its_tests(fault: mutate.Fault) -> None:
    assert (mutate.ROOT / fault.file).read_text().count(fault.before) == 1
    assert fault.before != fault.after
    if fault.tests.startswith(mutate.NATIVE):
        assert fault.tests.removeprefix(mutate.NATIVE) in mutate.NATIVE_GROUPS
    else:
        assert all((mutate.ROOT / one).exists() for one in fault.tests.split() if "/" in one)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder instead of the repository."""
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    mutate.fail_without_a_fault.cache_clear()
    return tmp_path


@pytest.mark.parametrize(("after", "expected"), [("== 3", True), ("> 1", False)])
def test_a_fault_is_caught_or_missed(root: Path, after: str, expected: bool) -> None:
    source = root / "test_two.py"
    source.write_text("def test_two():\n    assert 1 + 1 == 2\n")
    assert mutate.is_caught(mutate.Fault("two", "test_two.py", "== 2", after, "test_two.py")) is expected
    assert source.read_text().endswith("== 2\n")


def test_a_place_that_is_gone_is_an_error(root: Path) -> None:
    (root / "one.py").write_text("one")
    with pytest.raises(ValueError, match=r"got 0 places in one\.py; expected 1"):
        mutate.is_caught(mutate.Fault("two", "one.py", "two", "", ""))


def test_tests_that_fail_anyway_catch_nothing(root: Path) -> None:
    (root / "one.py").write_text("x = 1\n")
    (root / "test_one.py").write_text("def test_one():\n    assert False\n")
    with pytest.raises(ValueError, match=r"one: test_one\.py fails without the fault"):
        mutate.is_caught(mutate.Fault("one", "one.py", "1", "2", "test_one.py"))


HANGS = """
import threading
from pathlib import Path
import one

def test_one():
    if one.x != 1:
        Path("waits").touch()
        threading.Event().wait()
"""


def test_a_fault_that_hangs_is_caught(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "one.py").write_text("x = 1\n")
    (root / "test_one.py").write_text(HANGS)
    assert not mutate.fail_without_a_fault("test_one.py")
    monkeypatch.setattr(mutate, "LIMIT_S", 3)
    assert mutate.is_caught(mutate.Fault("one", "one.py", "1", "2", "test_one.py"))
    assert (root / "one.py").read_text() == "x = 1\n"


TRIES = """
import pathlib, sys
sys.path.insert(0, {tools!r})
import mutate
mutate.ROOT = pathlib.Path.cwd()
mutate.is_caught(mutate.Fault("one", "one.py", "1", "2", "test_one.py"))
"""


def test_the_source_is_restored_after_sigterm(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "test_one.py").write_text(HANGS)
    command = [sys.executable, "-c", TRIES.format(tools=str(ROOT / "tools"))]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        assert (tmp_path / "one.py").read_text() == "x = 2\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert (tmp_path / "one.py").read_text() == "x = 1\n"


def test_what_does_not_compile_is_an_error_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho 'error: expected ; before }'\nexit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MUTATIONS_BUILD", str(tmp_path))
    mutate.fail_without_a_fault.cache_clear()
    native = next(fault for fault in FAULTS if fault.tests.startswith(mutate.NATIVE))
    with pytest.raises(ValueError, match=r"exit status 1: error: expected ; before"):
        mutate.is_caught(native)


def test_ten_seeds_in_a_row_are_all_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[mutate.Fault] = []

    def is_caught(fault: mutate.Fault) -> bool:
        tried.append(fault)
        return True

    monkeypatch.setattr(mutate, "is_caught", is_caught)
    assert [mutate.main(["--tenth", str(seed)]) for seed in range(7, 17)] == [0] * 10
    assert sorted(fault.name for fault in tried) == sorted(fault.name for fault in FAULTS)


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    name = FAULTS[0].name
    assert mutate.main([name, f"{name}s"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"got the unknown names {name}s; expected names of tools/mutations.toml; did you mean {name}?" in shown.err
