"""What mypy and pyright say of programs that use the API: nothing of right ones, and each mistake by its line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def errors(program: Path, cache: Path) -> dict[int, str]:
    """The errors of mypy, strict, in ``program``, by line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    # An empty configuration: the repository's own would change what users see.
    options = ["--config-file=", f"--cache-dir={cache}", "--no-pretty", "--follow-imports=silent", str(program)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(.*?):(\d+): error: (.*)", line)
        if match:
            assert Path(match[1]).name == program.name, line
            found[int(match[2])] = found.get(int(match[2]), "") + match[3]
    return found


def mistakes() -> dict[int, str]:
    """What the lines of the wrong program say about themselves."""
    lines = (HERE / "wrong.py").read_text(encoding="utf-8").splitlines()
    return {number: comment for number, line in enumerate(lines, 1) if (comment := line.partition("  # ")[2])}


def test_ported_programs_pass_and_mistakes_are_found(tmp_path: Path) -> None:
    assert errors(HERE / "ported.py", tmp_path) == {}
    found = errors(HERE / "wrong.py", tmp_path)
    assert found.keys() == mistakes().keys(), found
    for number, text in mistakes().items():
        assert text in found[number]


def test_pyright_finds_the_same_lines() -> None:
    pytest.importorskip("basedpyright")
    # The build of pyright that brings its own Node.js.
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--level", "error", "--outputjson"]
    programs = [str(HERE / name) for name in ("ported.py", "wrong.py")]
    done = subprocess.run([*command, *programs], capture_output=True, text=True, timeout=500, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {Path(one["file"]).name for one in found} == {"wrong.py"}, found
    assert {one["range"]["start"]["line"] + 1 for one in found} == mistakes().keys(), found
