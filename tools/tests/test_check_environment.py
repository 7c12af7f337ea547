"""The check that sessions run inside their environments sees what is too much and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which two packages of this repository are installed, and one module of somebody else."""
    for name in ("comm_utils", "comm_config"):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
    (tmp_path / "comm_utils.py").write_text("import heavy")
    (tmp_path / "comm_config.py").write_text("")
    (tmp_path / "heavy.py").write_text("")
    (tmp_path / "broken.py").write_text("import not_there")
    return tmp_path


def check(site: Path, *arguments: str) -> tuple[int, str]:
    # -S: without this environment's own site-packages.
    code = (
        f"import sys; sys.argv[0] = 'check'; sys.path.insert(0, {str(ROOT / 'tools')!r})\nimport check_environment as c"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; sys.exit(c.main())", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_as_declared(site: Path) -> None:
    code, output = check(
        site, "--siblings", "comm-config", "comm-utils", "--import", "comm_config", "--without", "torch"
    )
    assert (code, output) == (0, "environment as declared: comm-config comm-utils\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--siblings", "comm-utils"], "comm-config is installed, and nothing declares it"),
        (["--siblings", "comm-utils", "comm-config", "comm-collectives"], "comm-collectives is declared, and is not"),
        (["--siblings", "comm-utils", "comm-config", "--without", "heavy"], "heavy is there, and nothing declares it"),
        (
            ["--siblings", "comm-utils", "comm-config", "--import", "comm_utils", "--not-loading", "heavy", "light"],
            "import comm_utils loads heavy, which only an extra brings",
        ),
        (["--siblings", "comm-utils", "comm-config", "--import", "broken"], "No module named 'not_there'"),
    ],
)
def test_a_difference_is_named(site: Path, arguments: list[str], problem: str) -> None:
    code, output = check(site, *arguments)
    assert code == 1
    assert problem in output
