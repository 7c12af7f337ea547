"""``run_pytest()`` of ``noxfile.py`` with ``TESTS_AGAIN``: what passes when tests run once more, and what fails."""

from __future__ import annotations

import os
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
    noxfile.run_pytest(session, {test!r}, "-q", parallel=False)
"""
PASSES = "def test_one():\n    pass\n"
FAILS_ONCE = """
from pathlib import Path

def test_one():
    seen = Path(__file__).with_name("seen")
    assert seen.exists() or seen.touch()
"""


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
    text = NOXFILE.format(root=str(ROOT), folder=str(tmp_path), test=str(file))
    (tmp_path / "noxfile.py").write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-f", str(tmp_path / "noxfile.py"), "-s", "tried"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PATH": path, "TESTS_AGAIN": "1"},
        check=False,
    )
    shown = done.stdout + done.stderr
    assert ("they run once more" in shown, done.returncode == 0) == (runs_again, passes), shown
