"""``run_pytest()`` of ``noxfile.py`` with ``TESTS_AGAIN``, and which files ``tidy()`` has read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT

# One session, without an environment of its own, beside those of the repository.
NOXFILE = """
import os, sys
import nox

os.chdir({root!r})
sys.path.insert(0, {root!r})
import noxfile

@nox.session(venv_backend="none")
def tried(session):
    session.virtualenv.location = {folder!r}
    {call}
"""
PASSES = "def test_one():\n    pass\n"
FAILS_ONCE = """
from pathlib import Path

def test_one():
    seen = Path(__file__).with_name("seen")
    assert seen.exists() or seen.touch()
"""


def run_session(folder: Path, call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "noxfile.py").write_text(NOXFILE.format(root=str(ROOT), folder=str(folder), call=call))
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "-m", "nox", "-f", str(folder / "noxfile.py"), "--envdir", str(folder), "-s", "tried"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PATH": path, **variables},
        check=False,
    )


@pytest.mark.parametrize(
    ("test", "runs_again", "passes"),
    [
        (PASSES, False, True),
        (FAILS_ONCE, True, True),
        ("def test_one():\n    assert False\n", True, False),
        # An exit status of 1 without a failed test.
        (f"import atexit, os\n\natexit.register(os._exit, 1)\n\n\n{PASSES}", False, False),
        # The failure would pass the second time, and the rest never ran.
        (f"{FAILS_ONCE}\ndef test_two():\n    raise KeyboardInterrupt\n", False, False),
    ],
    ids=["passes", "fails once", "fails twice", "fails outside of tests", "is interrupted"],
)
def test_tests_run_again(tmp_path: Path, test: str, runs_again: bool, passes: bool) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(test)
    done = run_session(tmp_path, f"noxfile.run_pytest(session, {str(file)!r}, '-q', parallel=False)", TESTS_AGAIN="1")
    shown = done.stdout + done.stderr
    assert ("they run once more" in shown, done.returncode == 0) == (runs_again, passes), shown


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_tidy_reads_every_native_source_or_says_which_not(tmp_path: Path) -> None:
    # It stands for clang-tidy's own script, which takes a minute, and writes down what it is given.
    script = tmp_path / "run-clang-tidy.py"
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$(dirname "$0")/given"\n')
    script.chmod(0o755)
    done = run_session(tmp_path, "noxfile.tidy(session)")
    assert done.returncode == 0, done.stdout + done.stderr
    given = (tmp_path / "given").read_text().replace("\\", "")
    warned = " ".join(line for line in done.stderr.splitlines() if "clang-tidy leaves out" in line)
    native = ROOT / "packages" / "comm-backend-ccl" / "native"
    for path in (*native.rglob("shared_memory/**/*.cpp"), *native.rglob("oneccl/*.c*")):
        assert (str(path) in given) != (path.relative_to(native).as_posix() in warned), (path.name, warned)
    assert "kernels/kernels.cpp" in given


def test_tidy_warns_without_a_compiler(tmp_path: Path) -> None:
    done = run_session(tmp_path, "noxfile.shutil.which = lambda name: None; noxfile.tidy(session)")
    assert "clang-tidy reads nothing: there is no C++ compiler" in done.stderr
