"""The pre-commit configuration is valid, and its hooks run sessions and scripts that exist."""

from __future__ import annotations

import subprocess
import sys

import noxfile
import pytest
from identify.identify import tags_from_filename
from pre_commit.clientlib import load_config

from workspace import ROOT


def test_hooks_run_what_exists() -> None:
    listing = subprocess.run([sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=True)
    hooks = [hook for repo in load_config(str(ROOT / ".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    assert len(hooks) >= 3
    for hook in hooks:
        *_, last = hook["entry"].split()
        if hook["entry"].startswith("nox "):
            assert f"* {last} " in listing.stdout
        else:
            assert (ROOT / last).is_file()


@pytest.mark.parametrize("name", ["a.py", "a.md", "a.toml", *(f"a{suffix}" for suffix in noxfile.NATIVE_SUFFIXES)])
def test_a_commit_of_what_lint_reads_runs_it(name: str) -> None:
    hooks = [hook for repo in load_config(str(ROOT / ".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    (lint,) = (hook for hook in hooks if hook["id"] == "lint")
    assert tags_from_filename(name) & set(lint["types_or"])


def test_commit_message_hook_is_installed_by_default() -> None:
    assert "commit-msg" in load_config(str(ROOT / ".pre-commit-config.yaml"))["default_install_hook_types"]
