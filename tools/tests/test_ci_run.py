"""``.ci/run`` leaves out nothing that ``nox`` and ``nox -t full`` run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def listed(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "nox", "--list", "--json", *arguments]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(shown)
    return found


def test_the_parts_of_the_full_run_are_all_there() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    named = {name for names in re.findall(r"nox -s ([^\"]+)\"", script) for name in names.split()}
    named = {name.strip("'") for name in named}
    tags = set(re.findall(r"nox -t (\w+)", script)) - {"full"}
    left_out = [
        one["session"]
        for one in listed("-t", "full")
        if "full" in one["tags"] and one["session"] not in named and not tags & set(one["tags"])
    ]
    assert left_out == []


def test_every_file_that_a_session_names_is_there() -> None:
    text = (ROOT / "noxfile.py").read_text()
    named = re.findall(r'"((?:packages|tests-integration|docs|tools)/[\w./-]+)"', text)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
