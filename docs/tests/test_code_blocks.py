"""Every code block of README.md, CHANGELOG.md, CONTRIBUTING.md, docs/ and the packages' own pages holds."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from code_blocks import Block, blocks, programs

from comm_config import load_config
from comm_utils.testing import patience, run_ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md")
    for page in sorted(ROOT.glob(pattern))
    if ".nox" not in page.parts
]
BLOCKS = [block for page in PAGES for block in blocks(page)]
# test_patches.py runs the others.
PROGRAMS = [program for page in PAGES for program in programs(page) if "patched" not in program.options]
JSON = [block for block in BLOCKS if block.language == "json"]
SHELL = [block for block in BLOCKS if block.language in ("bash", "sh", "console")]

# Commands that are not executed here, because something else does so.
COVERED_ELSEWHERE = {
    r"python3 -m venv .*": ".ci/run, in an empty environment",
    r"(\.|source) \S*/?bin/activate": ".ci/run, in an empty environment",
    r"(\S*/|python3? -m )?pip install .*": ".ci/run and the install-<package> sessions",
    r"(\S*/)?nox( .*)?": "the sessions themselves; that they exist is checked below",
    r"(torchrun|python3? -m torch\.distributed\.run) .*digits\.py.*": "nox -s demo",
    r"python3? docs/examples/same_weights\.py( .*)?": "nox -s demo",
    r"torchrun .*docs/examples/training/\w+\.py.*": "tests-integration/test_training_examples.py",
    r"torchrun --nnodes .*": "nox -s launchers",
    r"(mpirun|srun) .*": "nox -s launchers",
    r"python3? benchmarks/\S+\.py.*": "nox -s bench",
    r"python3? tools/bump_version\.py .*": "tools/tests",
    r"python3? tools/fetch_oneccl\.py": "every session that compiles",
    r"git clone .*": "whoever reads this has done it",
}


def named(value: object) -> str:
    return f"{value.page.relative_to(ROOT)}:{value.line}" if isinstance(value, Block) else str(value)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An empty folder with the files that the page of this block shows."""
    page = request.getfixturevalue("block").page
    for block in BLOCKS:
        if block.page == page and "file" in block.options:
            (tmp_path / block.options["file"]).write_text(block.text)
            if block.language == "toml":
                install_metadata(tomllib.loads(block.text)["project"], tmp_path)
    return tmp_path


def install_metadata(project: dict[str, Any], folder: Path) -> None:
    """Write the name and the entry points as ``pip install`` does, beside the modules of the project."""
    target = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    target.mkdir()
    (target / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (target / "entry_points.txt").write_text("\n".join(lines))


def assert_prints(block: Block, got: str) -> None:
    if block.output is None:
        return
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(block.output, got, flags):
        pytest.fail(f"{block} shows\n{block.output}\nand it prints\n{got}", pytrace=False)


@pytest.mark.parametrize("block", PROGRAMS, ids=named)
def test_python(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (needed := block.options.get("needs")) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is installed by nox -s ecosystem only")
    script = folder / "program.py"
    # In a traceback, the lines of the page.
    script.write_text("\n" * block.line + block.text)
    monkeypatch.chdir(folder)
    if ranks := int(block.options.get("ranks", 0)):
        assert_prints(block, "".join(run_ranks(str(script), ranks, timeout_s=120)))
        return
    assert_prints(block, "".join(run_ranks(str(script), 1, timeout_s=120, launcher_env=False)))


@pytest.mark.parametrize("block", JSON, ids=named)
def test_json(block: Block) -> None:
    document = json.loads(block.text)
    if "data" not in block.options:
        load_config(document, environ={})


def commands(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    bare = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines)
    return [part for line in bare for part in line.split(" && ") if part]


def elsewhere(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in COVERED_ELSEWHERE)


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_commands(block: Block, folder: Path) -> None:
    executed = [command for command in commands(block) if not elsewhere(command)]
    if not executed:
        return
    # Installed scripts are beside the interpreter, whether the environment is activated or not.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    script = "set -euo pipefail\n" + "\n".join(executed)
    limit_s = 120 * patience()
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        pytest.fail(f"{block} fails:\n{done.stdout}{done.stderr}", pytrace=False)
    if block.language == "console":
        shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
        block.output = "\n".join(shown) + "\n" if shown else None
    assert_prints(block, done.stdout)


def test_sessions_named_in_commands_exist() -> None:
    listing = subprocess.run([sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=True)
    sessions = set(re.findall(r"^[*-] ([^\s(]+)", listing.stdout, re.MULTILINE))
    used = {
        name
        for block in SHELL
        for command in commands(block)
        if (match := re.fullmatch(r"(?:\S*/)?nox .*?(?:-s|--session) ([^-].*?)( -- .*)?", command))
        for name in match[1].split()
    }
    assert sorted(used - sessions) == []


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.*?) *$", without_code(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        # A heading that occurs again gets a number.
        repeated = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{repeated}" if repeated else name)
    return names


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link leads to a file that exists, and every anchor to a heading of that page."""
    assert broken_links(page) == []


#: Folders of the repository, by which a path in backticks is recognised.
FOLDERS = "benchmarks|docs|packages|tests-integration|tools"
#: Stand for any file of their kind.
PATTERNS = {"docs/decisions/NNN-title.md"}


def missing_paths(page: Path) -> list[str]:
    """Return the paths in backticks, from the root of the repository, that lead to nothing; ``*`` is any name."""
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./*-]*)`", without_code(page)))
    return sorted(path for path in named - PATTERNS if not any(ROOT.glob(path.rstrip("/"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_backticks_exist(page: Path) -> None:
    assert missing_paths(page) == []


def test_missing_paths_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`docs/gone.md`, `packages/*/src`, `docs/tests/`, `tools/*.gone`\n```\n`docs/block`\n```\n")
    assert missing_paths(page) == ["docs/gone.md", "tools/*.gone"]


def test_each_decision_has_its_own_number() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [int(path.name.split("-")[0]) for path in decisions]
    assert numbers == list(range(1, len(decisions) + 1))
    assert [path.read_text().partition(".")[0] for path in decisions] == [f"# {number}" for number in numbers]


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `first`, part\n\n## Twice\n\n## Twice\n\n[a](#the-first-part) [b](page.md#twice-1) [c](https://example.org/#x)"
        "\n"
        "[d](missing.md) [e](#missing) [f](page.md#twice-2) `[g](code.md)`\n"
        "```text\n# Code\n[h](code.md)\n```\n[i](#code)\n"
    )
    assert broken_links(page) == ["missing.md", "#missing", "page.md#twice-2", "#code"]
