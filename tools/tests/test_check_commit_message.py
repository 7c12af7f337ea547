"""A commit message with a subject that is too long is refused; what Git writes itself is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import check_commit_message
from workspace import ROOT

LONGEST = "x" * 72


@pytest.mark.parametrize(
    "message",
    [
        LONGEST,
        f"{LONGEST}\n\nA body with lines of any length {'y' * 100}\n",
        f"# a comment of Git's\n\n{LONGEST}\n",
        f"Merge branch '{LONGEST}'",
        f"fixup! {LONGEST}",
        f"Short\n{check_commit_message.SCISSORS}\n+{LONGEST}.",
    ],
)
def test_accepted(message: str) -> None:
    assert list(check_commit_message.problems(message)) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"{LONGEST}x", "73 characters, expected at most 72"),
        ("Do something.", "full stop"),
        ("Do something\nand more", "empty line below the subject"),
        ("\n# only comments\n", "empty message"),
    ],
)
def test_refused(message: str, expected: str) -> None:
    (problem,) = check_commit_message.problems(message)
    assert expected in problem


def test_hook(tmp_path: Path) -> None:
    """Git itself refuses the commit where the script is its hook."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "core.hooksPath=.git/hooks")
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert git("init", "--quiet").returncode == 0
    hook = tmp_path / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tools/check_commit_message.py"}" "$1"\n')
    hook.chmod(0o755)
    refused = git("commit", "--allow-empty", "--message", f"{LONGEST}x")
    assert refused.returncode != 0
    assert "73 characters" in refused.stderr
    assert git("commit", "--allow-empty", "--message", LONGEST).returncode == 0
