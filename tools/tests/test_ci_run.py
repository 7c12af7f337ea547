"""``.ci/run`` leaves out nothing that ``nox`` and ``nox -t full`` run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import noxfile
import pytest

import readme_command

ROOT = Path(__file__).parents[2]


def listed(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "nox", "--list", "--json", *arguments]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(shown)
    return found


def script() -> str:
    """Return ``.ci/run`` without comments, and with the commands of ``README.md`` in their places."""
    text = re.sub(r"(?m)^\s*#.*$", "", (ROOT / ".ci" / "run").read_text())
    readme = readme_command.commands((ROOT / "README.md").read_text())
    return re.sub(r"\$\(readme (\w+)\)", lambda found: readme[found[1]].strip(), text)


def test_what_the_full_run_leaves_out_has_a_reason() -> None:
    command = [sys.executable, "-m", "nox", "--list"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    others = re.findall(r"(?m)^- (\S+)(?: \[([\w,-]+)\])?", shown)  # "*" marks those of plain nox
    left_out = {name for name, tags in others if "full" not in tags.split(",")}
    whole = {name if name in noxfile.NOT_IN_FULL else name.partition("(")[0] for name in left_out}
    # Of a session that is in full, what takes options.
    targets = {f"native -- --target {target}" for target in noxfile.CROSS}
    assert whole | targets == set(noxfile.NOT_IN_FULL)


@pytest.mark.parametrize("has_newest", [True, False])
def test_the_tests_of_commands_run_in_full_with_or_without_the_newest_python(tmp_path: Path, has_newest: bool) -> None:
    version = noxfile.COMPATIBILITY["newest"][0]
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        pytest.skip(f"this is Python {version} itself")
    if has_newest:
        found = tmp_path / "versions" / f"{version}.0" / "bin" / f"python{version}"
        found.parent.mkdir(parents=True)
        found.symlink_to(sys.executable)
    # Without what the machine has of it.
    env = {**os.environ, "PYENV_ROOT": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    command = [sys.executable, "-m", "nox", "--list", "--json", "-t", "newest"]
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    tags = {one["session"]: one["tags"] for one in json.loads(shown)}
    assert all("full" in one for one in tags.values())
    assert tags.keys() - {"commands"} == {"compat(newest)", "coverage"}
    assert ("commands" in tags) is not has_newest


def test_the_full_run_has_a_reason_or_a_part_for_the_tests_of_commands() -> None:
    assert ("commands" in noxfile.NOT_IN_FULL) is noxfile.HAS_NEWEST


def test_comments_run_nothing() -> None:
    assert "nox -t full" in (ROOT / ".ci" / "run").read_text()
    assert "nox -t full" not in script()


def test_the_parts_of_the_full_run_are_all_there() -> None:
    named = {
        name
        for names in re.findall(r"nox -s ([^\"]+)\"", script())
        if "--target" not in names
        for name in names.split()
    }
    named = {name.strip("'") for name in named}
    tags = set(re.findall(r"nox -t (\w+)", script())) - {"full"}
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
    # Most are made of their names.
    values = [value for name, value in vars(noxfile).items() if name.isupper()]
    lists = [value for value in values if isinstance(value, list)]
    named += [one for value in lists for one in value if isinstance(one, str) and "/" in one]
    named += [value for value in values if isinstance(value, str) and value.startswith("tests-integration/")]
    assert set(noxfile.LONG_TESTS + noxfile.ON_EVERY_LIBRARY) <= set(named)
    named = [path.removeprefix("--ignore=") for path in named]
    named += [f"benchmarks/{program}.py" for program in noxfile.BENCHMARKS]
    assert [path for path in named if not (ROOT / path).exists()] == []
