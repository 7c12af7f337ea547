"""What mypy says of programs that use the API: nothing of right ones, and each mistake by its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_ported_programs_pass_and_mistakes_are_found(tmp_path: Path) -> None:
    assert errors(HERE / "ported.py", tmp_path) == {}
    wrong = HERE / "wrong.py"
    expected = {
        number: comment
        for number, line in enumerate(wrong.read_text(encoding="utf-8").splitlines(), 1)
        if (comment := line.partition("  # ")[2])
    }
    found = errors(wrong, tmp_path)
    assert found.keys() == expected.keys(), found
    for number, text in expected.items():
        assert text in found[number]
